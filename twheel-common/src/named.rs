//! What has a stable name, and a line for a reader.

/// An enumeration of which each variant has a name, and of which the doc comment is what [`meaning`] tells.
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
            /// All of them, in order.
            pub const ALL: &[Self] = &[$(Self::$Variant,)+];

            /// Stable name.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$Variant => $name,)+
                }
            }

            /// One line for a reader.
            pub const fn meaning(self) -> &'static str {
                match self {
                    $(Self::$Variant => concat!($($meaning),+).trim_ascii(),)+
                }
            }
        }
    };
}
