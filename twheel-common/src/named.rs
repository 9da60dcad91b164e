//! Enumerations whose variants have a stable name and a description for users.

/// Defines an enumeration whose variants have names, and whose doc comments are what [`meaning`]
/// returns.
///
/// [`meaning`]: crate::counter::Counter::meaning
#[macro_export]
macro_rules! named {
    (
        $(#[$attribute:meta])+
        $visibility:vis enum $Name:ident {
            $($(#[doc = $meaning:literal])+ $Variant:ident = $name:literal,)+
        }
    ) => {
        $(#[$attribute])+
        $visibility enum $Name {
            $($(#[doc = $meaning])+ $Variant,)+
        }

        impl $Name {
            /// All variants, in order.
            pub const ALL: &[Self] = &[$(Self::$Variant,)+];

            /// Stable name.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$Variant => $name,)+
                }
            }

            /// One line that describes it to a user.
            pub const fn meaning(self) -> &'static str {
                match self {
                    $(Self::$Variant => concat!($($meaning),+).trim_ascii(),)+
                }
            }
        }
    };
}
