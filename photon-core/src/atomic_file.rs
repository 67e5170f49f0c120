//! Files that appear whole or not at all: written beside their place, then renamed.

use std::io::{self, Write};
use std::path::Path;

use tempfile::NamedTempFile;

/// A temporary file in the folder of `path`, with the rights of any new file.
///
/// # Errors
///
/// The system's.
pub fn beside(path: &Path) -> io::Result<NamedTempFile> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut builder = tempfile::Builder::new();
    #[cfg(unix)]
    {
        // The umask decides. A temporary file is otherwise its owner's alone.
        use std::os::unix::fs::PermissionsExt;
        builder.permissions(std::fs::Permissions::from_mode(0o666));
    }
    builder.prefix(".unfinished-").tempfile_in(folder)
}

/// Puts a finished file in its place.
///
/// # Errors
///
/// The system's; `path` is then as it was.
pub fn finish(file: NamedTempFile, path: &Path) -> io::Result<()> {
    file.as_file().sync_all()?;
    file.persist(path)?;
    Ok(())
}

/// Writes a whole file.
///
/// # Errors
///
/// The system's; `path` is then as it was.
pub fn write(path: &Path, contents: &[u8]) -> io::Result<()> {
    let mut file = beside(path)?;
    file.write_all(contents)?;
    finish(file, path)
}
