//! What is wrong with the input is said in a sentence that names it, and nothing is left half-written.

use std::fs;
use std::path::{Path, PathBuf};

use assert_cmd::Command;
use photon_core::checkpoint::{Checkpoint, CheckpointError};
use photon_core::device::DeviceChoice;
use photon_core::tokenizer::Tokenizer;
use safetensors::Dtype;
use tempfile::TempDir;

use crate::programs::{
    assert_says, complaint_of, load, path_of, photon_infer, photon_train, repository, set, shipped_text, stdout_of,
    tiny_checkpoint, write_tiny_run,
};
use crate::weights::{Stored, Weights};

/// A tiny run that a test may spoil.
struct Setup {
    folder: TempDir,
    config: PathBuf,
}

impl Setup {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let config = write_tiny_run(folder.path());
        Self { folder, config }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn write(&self, name: &str, contents: impl AsRef<[u8]>) {
        fs::write(self.path(name), contents).unwrap();
    }

    fn out(&self) -> PathBuf {
        self.path("runs/bad")
    }

    fn run(&self, args: &[&str]) -> Command {
        let mut command = photon_train(["run".as_ref(), self.config.as_os_str(), "--out".as_ref()]);
        command.arg(self.out()).args(args);
        command
    }

    fn run_with(&self, overrides: &[&str]) -> Command {
        let mut command = self.run(&[]);
        command.args(set(overrides));
        command
    }

    /// What a run complains of that must end before there is a run folder.
    fn refused(&self, command: Command) -> String {
        let complaint = complaint_of(command);
        assert!(!self.out().exists(), "{complaint}");
        assert_eq!(temporary_files(self.folder.path()), [] as [PathBuf; 0]);
        complaint
    }
}

/// Files that only stand for others while they are written.
fn temporary_files(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(temporary_files(&path));
        } else {
            let name = path.file_name().unwrap().to_string_lossy();
            let extension = path.extension().map(|extension| extension.to_string_lossy().into_owned());
            if name.starts_with('.') || matches!(extension.as_deref(), Some("tmp" | "partial")) {
                found.push(path.clone());
            }
        }
    }
    found
}

#[test]
fn a_wrong_config_is_named_by_its_key() {
    let setup = Setup::new();
    for (overrides, said) in [
        ("stpes=4", "unknown field `stpes`"),
        ("optimizer.lr=1e-3", "unknown field `lr`"),
        ("model.levels.0.chunk_length=4", "unknown field `chunk_length`"),
        ("model.levels.0.encoder.attention=sideways", "at `levels[0].encoder.attention`"),
        ("model.levels.0.chunk_len=0", "levels.0.chunk_len = 0: must be at least 1"),
        ("model.levels.1.encoder.n_heads=3", "levels.1.encoder.n_heads = 3: must divide the width 16"),
        ("model.levels.0.decoder.n_kv_heads=3", "levels.0.decoder.n_kv_heads = 3: must divide n_heads = 2"),
        (
            "model.levels.1.encoder.attention={ sparse = { window = 0, sinks = 1, block = 2, pick = { top = 1 } } }",
            "levels.1.encoder.attention.sparse.window = 0: must be at least 1",
        ),
        (
            "model.levels.0.encoder.attention={ sparse = { window = 2, sinks = 0, block = 2, pick = { every = 0 } } }",
            "levels.0.encoder.attention.sparse.pick.every = 0: must be at least 1",
        ),
        ("model.architecture=rnn", "\"rnn\" is unknown; use \"photon\" or \"flat\""),
        ("steps=0", "steps = 0: must be at least 1"),
        ("seq_len=3", "seq_len = 3: is shorter than the product of the chunk lengths"),
        ("data.held_out.tail.fraction=0.7", "`held_out.tail.fraction` is 0.7"),
        ("steps=many", "at `steps`"),
        ("eval.max_tokens=4", "eval.max_tokens = 4: must be at least seq_len"),
        ("optimizer.learning_rate=-1.0", "optimizer.learning_rate = -1: must be above 0"),
    ] {
        let complaint = setup.refused(setup.run_with(&[overrides]));
        assert_says(&complaint, &[said, "run.toml"]);
    }
    let complaint = setup.refused(setup.run_with(&["model.levels.7.chunk_len=2"]));
    assert_says(&complaint, &["--set model.levels.7.chunk_len=2", "`7` is no index of a list of 2 entries"]);
}

#[test]
fn a_config_that_is_missing_or_no_toml_is_named() {
    let setup = Setup::new();
    let complaint = complaint_of(photon_train(["run", "no/such.toml"]));
    assert_says(&complaint, &["cannot read the config no/such.toml"]);
    setup.write("run.toml", "steps = \n");
    assert_says(&setup.refused(setup.run(&[])), &["run.toml is not valid TOML", "line 1"]);
    setup.write("run.toml", "steps = 1\n");
    assert_says(&setup.refused(setup.run(&[])), &["run.toml: at `model`: is missing"]);
}

#[test]
fn a_wrong_model_config_is_named_wherever_it_is_read() {
    let config = repository().join("configs/model/flat-small.toml");
    let config = config.as_os_str().to_str().unwrap();
    for mut command in [photon_train(["info", config]), photon_train(["bench", config])] {
        command.args(["--set", "stack.n_heads=7"]);
        assert_says(&complaint_of(command), &["flat-small.toml: stack.n_heads = 7: must divide"]);
    }
    let command = photon_infer(["bench", "--config", config, "--set", "stack.n_heads=7"]);
    assert_says(&complaint_of(command), &["flat-small.toml: stack.n_heads = 7: must divide"]);
}

#[test]
fn a_text_that_cannot_be_used_is_named() {
    let setup = Setup::new();
    setup.write("empty.txt", "");
    setup.write("binary.txt", b"text\0more");
    setup.write("short.txt", "Call me Ishmael.\n");
    setup.write("lines.jsonl", "{\"text\": \"fine\"}\n{\"txt\": \"not\"}\n");
    for (path, said) in [
        ("none.txt", "none.txt: no such file"),
        ("empty.txt", "empty.txt: the file is empty"),
        ("binary.txt", "binary.txt: expected text, found a NUL byte at byte offset 4"),
        ("short.txt", "tokens, expected at least 32"),
        ("lines.jsonl", "lines.jsonl line 2: expected a JSON object with a string `text`"),
        ("*.csv", "no file matches the pattern"),
    ] {
        let complaint = setup.refused(setup.run_with(&[&format!("data.paths=[{path:?}]")]));
        assert_says(&complaint, &[said]);
    }
    let complaint = setup.refused(setup.run_with(&["data.held_out={ paths = { paths = [\"none.txt\"] } }"]));
    assert_says(&complaint, &["none.txt: no such file"]);
    let mut command = photon_train(["eval".as_ref(), tiny_checkpoint().as_os_str(), "none.txt".as_ref()]);
    command.current_dir(setup.folder.path());
    assert_says(&complaint_of(command), &["none.txt: no such file"]);
}

fn train_tokenizer(setup: &Setup, vocab_size: usize) -> PathBuf {
    let path = setup.path(&format!("{vocab_size}.json"));
    let mut command = photon_train(["tokenizer"]);
    command.arg(setup.path("text.txt")).args(["--vocab-size", &vocab_size.to_string()]).arg("--out").arg(&path);
    stdout_of(command);
    path
}

#[test]
fn text_that_is_not_utf8_is_for_the_byte_tokenizer_only() {
    let setup = Setup::new();
    let tokenizer = train_tokenizer(&setup, 260);
    let mut text = fs::read(setup.path("text.txt")).unwrap();
    text[500] = 0xff;
    setup.write("latin.txt", &text);
    let tokenizer = format!("tokenizer={}", tokenizer.display());
    let data = "data.paths=[\"latin.txt\"]";
    let complaint = setup.refused(setup.run_with(&[data, &tokenizer, "model.vocab_size=260"]));
    assert_says(&complaint, &["latin.txt", "expected UTF-8", "byte offset 500"]);
    stdout_of(setup.run_with(&[data, "steps=1", "eval.sample_tokens=0"]));

    let latin = setup.path("latin.txt");
    let out = setup.path("not-made.json");
    let mut command = photon_train(["tokenizer".as_ref(), latin.as_os_str(), "--out".as_ref(), out.as_os_str()]);
    command.args(["--vocab-size", "260"]);
    assert_says(&complaint_of(command), &["latin.txt", "expected UTF-8", "byte offset 500"]);
    assert!(!out.exists());
}

#[test]
fn a_tokenizer_that_does_not_fit_is_refused() {
    let setup = Setup::new();
    let tokenizer = train_tokenizer(&setup, 260);
    let complaint = setup.refused(setup.run_with(&[&format!("tokenizer={}", tokenizer.display())]));
    assert_says(&complaint, &["model.vocab_size = 257", "260 entries", "set model.vocab_size=260"]);
    let complaint = setup.refused(setup.run_with(&["tokenizer=none.json"]));
    assert_says(&complaint, &["cannot read the tokenizer", "none.json"]);
    setup.write("other.json", "{\"hidden_size\": 64}");
    let complaint = setup.refused(setup.run_with(&["tokenizer=other.json"]));
    assert_says(&complaint, &["other.json is no tokenizer"]);
    let text = shipped_text();
    let mut command = photon_train(["tokenizer".as_ref(), text.as_os_str(), "--out".as_ref()]);
    command.arg(setup.path("small.json")).args(["--vocab-size", "200"]);
    assert_says(&complaint_of(command), &["vocab_size is 200, expected at least 257"]);
}

#[test]
fn a_device_that_is_not_there_is_no_fallback() {
    let setup = Setup::new();
    let complaint = setup.refused(setup.run(&["--device", "tpu"]));
    assert_says(&complaint, &["unknown device \"tpu\"", "auto, cpu, cuda or wgpu"]);
    for (name, choice) in [("cuda", DeviceChoice::Cuda), ("wgpu", DeviceChoice::Wgpu)] {
        if let Err(error) = choice.open() {
            assert_says(&error.to_string(), &["--device cpu"]);
            assert_says(&setup.refused(setup.run(&["--device", name])), &[&error.to_string()]);
            let mut command = photon_infer(["generate", "--device", name, "--model"]);
            command.arg(tiny_checkpoint());
            assert_says(&complaint_of(command), &[&error.to_string()]);
        }
    }
}

#[test]
fn a_run_that_is_there_is_kept() {
    let setup = Setup::new();
    stdout_of(setup.run_with(&["steps=1"]));
    let before = contents(&setup.out());
    let complaint = complaint_of(setup.run_with(&["steps=2"]));
    assert_says(&complaint, &["runs/bad exists and is not empty", "--out", "--overwrite"]);
    assert_eq!(contents(&setup.out()), before);

    fs::remove_file(setup.out().join("run.toml")).unwrap();
    let before = contents(&setup.out());
    let complaint = complaint_of(setup.run(&["--overwrite"]));
    assert_says(&complaint, &["runs/bad is not a run folder", "not removed"]);
    assert_eq!(contents(&setup.out()), before);
}

/// Every file below a folder with its bytes.
fn contents(folder: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true => found.extend(contents(&path)),
            false => found.push((path.clone(), fs::read(&path).unwrap())),
        }
    }
    found.sort();
    found
}

#[test]
fn a_folder_that_cannot_be_written_is_named() {
    let setup = Setup::new();
    setup.write("runs", "a file where the folder should be");
    assert_says(&complaint_of(setup.run(&[])), &["cannot write", "runs"]);
}

/// A copy of the tiny checkpoint.
fn copied_checkpoint() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for file in ["model.safetensors", "config.toml", "tokenizer.json"] {
        fs::copy(tiny_checkpoint().join(file), folder.path().join(file)).unwrap();
    }
    folder
}

/// Both programs refuse a checkpoint, in the same words.
#[track_caller]
fn assert_refused(checkpoint: &Path, said: &[&str]) {
    let mut generate = photon_infer(["generate", "--model"]);
    generate.arg(checkpoint);
    let mut bench = photon_infer(["bench", "--model"]);
    bench.arg(checkpoint);
    let mut eval = photon_train(["eval"]);
    eval.arg(checkpoint).arg(shipped_text());
    for command in [generate, bench, eval] {
        assert_says(&complaint_of(command), said);
    }
}

#[test]
fn a_folder_that_is_no_checkpoint_is_refused() {
    for file in ["model.safetensors", "config.toml", "tokenizer.json"] {
        let checkpoint = copied_checkpoint();
        fs::remove_file(checkpoint.path().join(file)).unwrap();
        assert_refused(checkpoint.path(), &["is no photon checkpoint", &format!("it has no {file}")]);
    }
    assert_refused("no/such/model".as_ref(), &["no/such/model is no photon checkpoint"]);
}

#[test]
fn weights_cut_short_or_of_another_make_are_refused() {
    let checkpoint = copied_checkpoint();
    let path = checkpoint.path().join("model.safetensors");
    let whole = Weights::read(&path);

    let bytes = fs::read(&path).unwrap();
    fs::write(&path, &bytes[..bytes.len() - 100]).unwrap();
    assert_refused(
        checkpoint.path(),
        &["model.safetensors is damaged", &format!("the file has {}", bytes.len() - 100)],
    );
    fs::write(&path, [&[0xff; 8], &bytes[8..]].concat()).unwrap();
    assert_refused(checkpoint.path(), &["model.safetensors is damaged", "its header claims"]);

    Weights { metadata: None, ..whole.clone() }.write(&path);
    assert_refused(checkpoint.path(), &["format version none", "import-llama"]);
    let mut newer = whole.clone();
    newer.metadata.as_mut().unwrap().insert("photon_format_version".into(), "99".into());
    newer.write(&path);
    assert_refused(checkpoint.path(), &["format version 99, expected 1"]);

    whole.write(&path);
    load(checkpoint.path());
}

/// The error of loading the tiny checkpoint with changed weights.
fn load_changed(change: impl FnOnce(&mut Weights)) -> CheckpointError {
    let checkpoint = copied_checkpoint();
    Weights::edit(&checkpoint.path().join("model.safetensors"), change);
    let device = DeviceChoice::Cpu.open().unwrap().device;
    Checkpoint::load(checkpoint.path(), &device).unwrap_err()
}

#[test]
fn tensors_that_do_not_fit_the_config_are_named() {
    let checkpoint = copied_checkpoint();
    Weights::edit(&checkpoint.path().join("model.safetensors"), |weights| drop(weights.tensors.remove("head.weight")));
    assert_refused(checkpoint.path(), &["model.safetensors does not fit its config: head.weight is missing"]);

    let renamed = load_changed(|weights| {
        let head = weights.tensors.remove("head.weight").unwrap();
        weights.tensors.insert("lm_head.weight".into(), head);
    });
    assert_says(&renamed.to_string(), &["head.weight is missing", "lm_head.weight is not part of the model"]);

    let more = load_changed(|weights| drop(weights.tensors.insert("head.bias".into(), Stored::f32(&[1], &[0.0]))));
    assert_says(&more.to_string(), &["head.bias is not part of the model"]);

    let turned = load_changed(|weights| weights.tensors.get_mut("head.weight").unwrap().shape.reverse());
    assert_says(&turned.to_string(), &["head.weight", "257", "16"]);

    let halves = load_changed(|weights| {
        let head = weights.tensors.get_mut("head.weight").unwrap();
        *head = head.halves(Dtype::F16, |x| burn::tensor::f16::from_f32(x).to_le_bytes());
    });
    assert_says(&halves.to_string(), &["head.weight is F16, expected F32"]);
    for error in [renamed, more, turned, halves] {
        assert!(matches!(error, CheckpointError::Tensors { .. }), "{error}");
    }
}

#[test]
fn a_checkpoint_whose_parts_do_not_fit_is_refused() {
    let checkpoint = copied_checkpoint();
    let path = checkpoint.path().join("config.toml");
    let config = fs::read_to_string(&path).unwrap();
    fs::write(&path, config.clone() + "chunks = 3\n").unwrap();
    assert_refused(checkpoint.path(), &["config.toml", "unknown field `chunks`"]);
    fs::write(&path, config.replacen("n_layers = 1", "n_layers = 2", 1)).unwrap();
    assert_refused(
        checkpoint.path(),
        &["does not fit its config", "encoders.0.stack.blocks.1.attention.q_proj.weight is missing"],
    );
    // Far more than the file holds: said before anything of that size is made.
    fs::write(&path, config.replacen("n_layers = 1", "n_layers = 1000000", 1)).unwrap();
    assert_refused(checkpoint.path(), &["model.safetensors does not fit its config: it holds", "config.toml asks for"]);
    fs::write(&path, config).unwrap();

    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("golden/llama/model/tokenizer.json");
    fs::copy(golden, checkpoint.path().join("tokenizer.json")).unwrap();
    assert_refused(checkpoint.path(), &["the tokenizer has 320 entries, the model's vocab_size is 257"]);
    Tokenizer::bytes().save(&checkpoint.path().join("tokenizer.json")).unwrap();
    load(checkpoint.path());
}

#[test]
fn arguments_out_of_range_are_refused() {
    let model = tiny_checkpoint().display().to_string();
    for (args, said) in [
        (["generate", "--model", &model, "--temperature=-1"], "temperature = -1"),
        (["generate", "--model", &model, "--top-k=0"], "top_k = 0"),
        (["generate", "--model", &model, "--top-p=1.5"], "top_p = 1.5"),
        (["generate", "--model", &model, "--max-tokens=many"], "--max-tokens"),
        (["bench", "--model", &model, "--decode-tokens=1"], "--decode-tokens 1"),
        (["bench", "--model", &model, "--batch-size=0"], "at least 1"),
        (["bench", "--model", &model, "--config=a.toml"], "cannot be used with"),
        (["bench", "--model", &model, "--memory-gib=0"], "must be a number above 0"),
        (["bench", "--model", &model, "--regime=64k"], "[possible values: prefill-heavy, decode-heavy, 8k, 32k]"),
        (["generate", "--model", &model, "--samples=0"], "at least 1"),
        (["generate", "--model", &model, "--preset=no/such.toml"], "cannot read the config no/such.toml"),
        (["generate", "--model", &model, "--set=caches.0.kyes=int8"], "preset exact: at `caches[0].kyes`"),
        (["generate", "--model", &model, "--set=caches.0.stages=stack"], "preset exact: caches.0.stages = stack: this"),
    ] {
        assert_says(&complaint_of(photon_infer(args)), &[said]);
    }
    let text = shipped_text().display().to_string();
    for (args, said) in [
        (["eval", &model, &text, "--seq-len=1"], "--seq-len 1: must be at least 2"),
        (["bench", "configs/model/flat-small.toml", "--steps=0", "--seq-len=8"], "--steps 0: must be at least 1"),
    ] {
        assert_says(&complaint_of(photon_train(args)), &[said]);
    }
}

/// A run that may not write files beyond some size: to the program a full disk.
#[cfg(unix)]
fn run_on_a_full_disk(setup: &Setup, max_kib: usize, overrides: &[&str]) -> String {
    let mut command = Command::new("bash");
    // Without the trap the system would end the program instead of refusing to write.
    command.args(["-c", "trap '' XFSZ; ulimit -f \"$0\"; exec \"$@\"", &max_kib.to_string()]);
    command.arg(path_of("photon-train")).arg("run").arg(&setup.config).arg("--out").arg(setup.out());
    command.args(set(overrides));
    let complaint = complaint_of(command);
    assert_eq!(temporary_files(setup.folder.path()), [] as [PathBuf; 0], "{complaint}");
    complaint
}

#[cfg(unix)]
#[test]
fn a_full_disk_is_reported_whatever_is_being_written() {
    // The tokens: 8 kB of text, two bytes each.
    let setup = Setup::new();
    assert_says(&run_on_a_full_disk(&setup, 4, &[]), &["cannot write", ".tokens", "free space"]);
    assert!(!setup.out().exists());

    // The weights.
    let setup = Setup::new();
    assert_says(&run_on_a_full_disk(&setup, 32, &["steps=1"]), &["cannot write", "model.safetensors", "disk full"]);
    for checkpoint in ["checkpoints/last", "checkpoints/best"] {
        assert!(!setup.out().join(checkpoint).join("model.safetensors").exists());
    }

    // The metrics and the events, which grow with the steps.
    let setup = Setup::new();
    let overrides =
        ["steps=5000", "eval.every_steps=10000", "checkpoint_every_steps=10000", "seq_len=4", "batch_size=1"];
    assert_says(&run_on_a_full_disk(&setup, 24, &overrides), &["cannot write", "runs/bad", "disk full"]);
}

#[cfg(target_os = "linux")]
#[test]
fn output_that_cannot_be_written_is_an_error() {
    let full = || fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let generate = ["generate", "--max-tokens", "4", "--model", tiny_checkpoint().to_str().unwrap()];
    for (name, args) in [
        ("photon-infer", generate.to_vec()),
        ("photon-infer", [&generate[..], &["--format", "json"]].concat()),
        ("photon-train", vec!["info", "configs/model/flat-small.toml"]),
    ] {
        let mut command = std::process::Command::new(path_of(name));
        let output = command.args(args).current_dir(repository()).stdout(full()).output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{stderr}");
        assert_says(&stderr, &["error: ", "No space left on device"]);
    }
}
