//! The real programs, as the tests run them: where they lie, on what, and how small.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use assert_cmd::Command;
use photon_core::checkpoint::Checkpoint;
use photon_core::device::DeviceChoice;
use serde_json::Value;

/// Overrides that make any run a matter of a second.
pub(crate) const CHEAP: [&str; 5] =
    ["steps=2", "seq_len=64", "batch_size=2", "eval.max_tokens=256", "eval.sample_tokens=4"];

/// A run of a second, text beside it: two levels over bytes.
const TINY_RUN: &str = r#"
steps = 60
seq_len = 32
batch_size = 4
replicas = 1
checkpoint_every_steps = 30

[model]
architecture = "photon"
vocab_size = 257
d_model = 16

[[model.levels]]
chunk_len = 2
d_model = 16
encoder = { n_layers = 1, n_heads = 2, d_ff = 24 }
converter = { prefix_len = 1 }
decoder = { n_layers = 1, n_heads = 2, d_ff = 24, attention = { stream = { window = 12 } } }

[[model.levels]]
chunk_len = 2
d_model = 16
encoder = { n_layers = 1, n_heads = 2, d_ff = 24 }
converter = { prefix_len = 1 }
decoder = { n_layers = 1, n_heads = 2, d_ff = 24 }

[data]
paths = ["text.txt"]
held_out = { tail = { fraction = 0.1 } }

[optimizer]
learning_rate = 1e-2
warmup_steps = 5

[eval]
every_steps = 20
max_tokens = 512
sample_prompt = "The "
sample_tokens = 8
"#;

/// The root of the repository, where the README's commands run.
pub(crate) fn repository() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the tests are a folder of the repository")
}

/// The text that is shipped.
pub(crate) fn shipped_text() -> PathBuf {
    repository().join("configs/data/moby-dick.txt")
}

/// The first lines of the shipped text, about `n_bytes`.
pub(crate) fn some_text(n_bytes: usize) -> Vec<u8> {
    let mut text = std::fs::read(shipped_text()).unwrap();
    let end = n_bytes + text[n_bytes..].iter().position(|&byte| byte == b'\n').unwrap() + 1;
    text.truncate(end);
    text
}

/// A program of the workspace; it lies beside the folder of this test's own executable.
pub(crate) fn path_of(name: &str) -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let folder = test.parent().and_then(Path::parent).unwrap();
    let path = folder.join(format!("{name}{}", std::env::consts::EXE_SUFFIX));
    assert!(path.is_file(), "{} is not built: run the tests with --workspace", path.display());
    path
}

/// A program, run in the root of the repository.
pub(crate) fn program(name: &str) -> Command {
    let mut command = Command::new(path_of(name));
    command.current_dir(repository());
    command
}

/// `photon-train` with arguments.
pub(crate) fn photon_train<A: AsRef<std::ffi::OsStr>>(args: impl IntoIterator<Item = A>) -> Command {
    let mut command = program("photon-train");
    command.args(args);
    command
}

/// `photon-infer` with arguments.
pub(crate) fn photon_infer<A: AsRef<std::ffi::OsStr>>(args: impl IntoIterator<Item = A>) -> Command {
    let mut command = program("photon-infer");
    command.args(args);
    command
}

/// `--set` before each of `overrides`.
pub(crate) fn set<S: ToString>(overrides: impl IntoIterator<Item = S>) -> Vec<String> {
    overrides.into_iter().flat_map(|key_value| ["--set".to_owned(), key_value.to_string()]).collect()
}

/// What a command prints that must succeed.
pub(crate) fn stdout_of(mut command: Command) -> String {
    let assert = command.assert().success();
    String::from_utf8(assert.get_output().stdout.clone()).unwrap()
}

/// The lines of JSON that a command prints.
pub(crate) fn json_of(command: Command) -> Vec<Value> {
    let text = stdout_of(command);
    text.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"))).collect()
}

/// What a command complains of that must end with an error: said by the program, not by a panic.
pub(crate) fn complaint_of(mut command: Command) -> String {
    let assert = command.assert().failure();
    let output = assert.get_output();
    let stderr = String::from_utf8(output.stderr.clone()).unwrap();
    assert!(matches!(output.status.code(), Some(1 | 2)), "{:?} says {}: {stderr}", command, output.status);
    assert!(stderr.lines().any(|line| line.starts_with("error: ")), "{stderr}");
    assert!(!stderr.contains("panicked"), "{stderr}");
    stderr
}

/// Checks that a text has all `parts`.
#[track_caller]
pub(crate) fn assert_says(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "no {part:?} in:\n{text}");
    }
}

/// Writes a tiny run and its text into `folder` and returns the run's file.
pub(crate) fn write_tiny_run(folder: &Path) -> PathBuf {
    std::fs::write(folder.join("text.txt"), some_text(8000)).unwrap();
    let path = folder.join("run.toml");
    std::fs::write(&path, TINY_RUN).unwrap();
    path
}

/// The same on documents as short as a clause, kept apart, and on a longer text: two sources.
pub(crate) fn write_run_of_clauses(folder: &Path) -> PathBuf {
    let path = write_tiny_run(folder);
    let text = String::from_utf8(some_text(12_000)).unwrap();
    let clauses = text.split([',', ';', '.']).map(str::trim).filter(|clause| !clause.is_empty());
    let lines: String = clauses.map(|clause| serde_json::json!({ "text": clause }).to_string() + "\n").collect();
    std::fs::write(folder.join("clauses.jsonl"), lines).unwrap();
    let (before, after) =
        TINY_RUN.split_once("paths = [\"text.txt\"]\nheld_out = { tail = { fraction = 0.1 } }").unwrap();
    let data = "packing = \"documents\"\ndocument_mask = true\n\
                [[data.sources]]\nname = \"clauses\"\npaths = [\"clauses.jsonl\"]\nweight = 3.0\n\
                held_out = { documents = { fraction = 0.2 } }\n\
                [[data.sources]]\nname = \"book\"\npaths = [\"text.txt\"]\nweight = 1.0\n\
                held_out = { tail = { fraction = 0.1 } }";
    std::fs::write(&path, format!("{before}{data}{after}")).unwrap();
    path
}

/// A tiny checkpoint of bytes, trained by the program; the first caller waits for it.
pub(crate) fn tiny_checkpoint() -> &'static Path {
    static CHECKPOINT: OnceLock<PathBuf> = OnceLock::new();
    CHECKPOINT.get_or_init(|| {
        // In the target folder, because a static is never dropped.
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap().keep();
        let (config, out) = (write_tiny_run(&folder), folder.join("run"));
        photon_train(["run".as_ref(), config.as_os_str(), "--out".as_ref(), out.as_os_str()]).assert().success();
        out.join("checkpoints/best")
    })
}

/// Loads a checkpoint that must be whole.
pub(crate) fn load(folder: &Path) -> Checkpoint {
    let device = DeviceChoice::Cpu.open().unwrap().device;
    Checkpoint::load(folder, &device).unwrap_or_else(|error| panic!("{error}"))
}

/// Splits a command line as a shell would: blanks, quotes, backslashes, a comment at the end.
pub(crate) fn shell_words(line: &str) -> Vec<String> {
    let mut words = Vec::new();
    let mut word: Option<String> = None;
    let mut quote = None;
    let mut chars = line.chars();
    while let Some(c) = chars.next() {
        match (quote, c) {
            (Some(open), c) if c == open => quote = None,
            (None, '"' | '\'') => {
                quote = Some(c);
                word.get_or_insert_default();
            }
            (None | Some('"'), '\\') => word.get_or_insert_default().extend(chars.next()),
            (None, '#') if word.is_none() => break,
            (None, c) if c.is_whitespace() => words.extend(word.take()),
            (_, c) => word.get_or_insert_default().push(c),
        }
    }
    assert_eq!(quote, None, "an open quote: {line}");
    words.extend(word);
    words
}

#[test]
fn lines_are_split_as_by_a_shell() {
    let line = r#"run  a.toml --set 'x = ["y z"]' --prompt "a \"b\" c" '' d\ e # a comment"#;
    let expected = ["run", "a.toml", "--set", "x = [\"y z\"]", "--prompt", "a \"b\" c", "", "d e"];
    assert_eq!(shell_words(line), expected);
}
