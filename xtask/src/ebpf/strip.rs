//! Removes from an object what neither the kernel nor aya reads.
//!
//! Three quarters of an object are DWARF. The relocations of the BTF are ignored by those who load
//! objects: their symbols are sections, and add nothing. What stays are the programs and maps, their
//! relocations, the types (`.BTF`), and the functions and lines that the verifier's log names
//! (`.BTF.ext`).

use anyhow::{Context, Result, ensure};
use object::{
    build::elf::{Builder, SectionData},
    elf::{EM_BPF, SHT_STRTAB},
};

/// Beginnings of the names of sections that are removed.
const UNREAD: [&str; 3] = [".debug_", ".rel.debug_", ".rel.BTF"];

/// The object without DWARF. The same object gives the same bytes on each machine.
pub fn strip(object: &[u8]) -> Result<Vec<u8>> {
    let mut builder = Builder::read(object).context("not an ELF file")?;
    ensure!(
        builder.header.e_machine == EM_BPF,
        "not an object of BPF programs"
    );
    let (mut has_lines, mut has_names) = (false, false);
    for section in &mut builder.sections {
        let name = section.name.as_slice();
        let is_unread = |start: &&str| name.starts_with(start.as_bytes());
        section.delete = UNREAD.iter().any(is_unread);
        has_lines |= name == b".BTF.ext";
        has_names |= matches!(section.data, SectionData::SectionString);
    }
    ensure!(
        has_lines,
        "the object names no lines: it was built without BTF"
    );
    // LLVM keeps the names of sections and of symbols in one section, the builder in two.
    if !has_names {
        let names = builder.sections.add();
        names.name = b".shstrtab".as_slice().into();
        names.sh_type = SHT_STRTAB;
        names.sh_addralign = 1;
        names.data = SectionData::SectionString;
    }
    let mut stripped = Vec::new();
    builder
        .write(&mut stripped)
        .context("cannot write an ELF file")?;
    Ok(stripped)
}

#[cfg(test)]
mod tests {
    use object::{
        build::elf::{Builder, Relocation, SectionData},
        elf::{R_BPF_64_32, SHF_INFO_LINK, SHT_PROGBITS, SHT_REL, STT_SECTION},
    };

    use super::strip;
    use crate::ebpf::committed;

    /// The object with a section of DWARF, its symbol, and a relocation of its own.
    fn with_dwarf(object: &[u8]) -> Vec<u8> {
        let mut builder = Builder::read(object).unwrap();
        let symbols = builder.sections.iter();
        let symbols = symbols.filter(|it| matches!(it.data, SectionData::Symbol));
        let symbols = symbols.map(|it| it.id()).next();
        let info = builder.sections.add();
        info.name = b".debug_info".as_slice().into();
        info.sh_type = SHT_PROGBITS;
        info.sh_addralign = 1;
        info.data = SectionData::Data(vec![7; 1000].into());
        let info = info.id();
        let symbol = builder.symbols.add();
        symbol.section = Some(info);
        symbol.set_st_info(0, STT_SECTION);
        let symbol = symbol.id();
        let relocations = builder.sections.add();
        relocations.name = b".rel.debug_info".as_slice().into();
        relocations.sh_type = SHT_REL;
        relocations.sh_flags = SHF_INFO_LINK.into();
        relocations.sh_link_section = symbols;
        relocations.sh_info_section = Some(info);
        relocations.sh_addralign = 8;
        relocations.sh_entsize = 16;
        relocations.data = SectionData::Relocation(vec![Relocation {
            r_offset: 8,
            symbol: Some(symbol),
            r_type: R_BPF_64_32,
            r_addend: 0,
        }]);
        let mut object = Vec::new();
        builder.write(&mut object).unwrap();
        object
    }

    #[test]
    fn all_but_dwarf_stays() {
        for name in ["twheel", "probe"] {
            let object = committed(name).unwrap();
            let larger = with_dwarf(&object);
            assert!(larger.len() > object.len() + 1000);
            assert!(strip(&larger).unwrap() == object, "{name}");
        }
    }

    #[test]
    fn an_object_without_lines_is_refused() {
        let object = committed("probe").unwrap();
        let mut builder = Builder::read(object.as_slice()).unwrap();
        let mut sections = builder.sections.iter_mut();
        let lines = sections.find(|it| it.name.as_slice() == b".BTF.ext");
        lines.unwrap().delete = true;
        let mut without = Vec::new();
        builder.write(&mut without).unwrap();
        assert!(strip(&without).is_err());
        assert!(strip(b"no ELF").is_err());
    }
}
