//! Files that appear whole or not at all: written beside their place, then renamed.

use std::io::{self, Write};
use std::path::Path;

use tempfile::{Builder, NamedTempFile, TempDir};

/// Begins the names of what a killed process has not finished.
pub const UNFINISHED: &str = ".unfinished-";

/// A temporary file in the folder of `path`, with the rights of any new file.
///
/// # Errors
///
/// The system's.
pub fn beside(path: &Path) -> io::Result<NamedTempFile> {
    unfinished(0o666).tempfile_in(folder_of(path))
}

/// A temporary folder in `parent`, with the rights of any new folder.
///
/// # Errors
///
/// The system's.
pub fn folder_in(parent: &Path) -> io::Result<TempDir> {
    unfinished(0o777).tempdir_in(parent)
}

/// The umask decides. What is temporary is otherwise its owner's alone.
fn unfinished(mode: u32) -> Builder<'static, 'static> {
    let mut builder = Builder::new();
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        builder.permissions(std::fs::Permissions::from_mode(mode));
    }
    #[cfg(not(unix))]
    let _ = mode;
    builder.prefix(UNFINISHED);
    builder
}

/// Puts a finished file in its place.
///
/// # Errors
///
/// The system's; `path` is then as it was.
pub fn finish(file: NamedTempFile, path: &Path) -> io::Result<()> {
    file.as_file().sync_all()?;
    file.persist(path)?;
    sync_folder(folder_of(path))
}

/// Sees to it that what was made, renamed or removed in a folder outlasts a loss of power.
///
/// # Errors
///
/// The system's.
pub fn sync_folder(folder: &Path) -> io::Result<()> {
    // Elsewhere a folder cannot be opened as a file, and the file system sees to it by itself.
    #[cfg(unix)]
    std::fs::File::open(folder)?.sync_all()?;
    #[cfg(not(unix))]
    let _ = folder;
    Ok(())
}

fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
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
