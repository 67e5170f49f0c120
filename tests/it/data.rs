//! Text prepared by the program: what it shows, what it keeps, and that a run trains on it.

use std::fs;
use std::io::Write;
use std::path::Path;

use serde_json::Value;

use crate::programs::{
    CHEAP, assert_says, complaint_of, json_of, photon_train, set, some_text, stdout_of, write_run_of_clauses,
    write_tiny_run,
};
use crate::runs::number;

/// A run of two sources, one of them packed lines.
pub(crate) fn write_mixed_run(folder: &Path) -> std::path::PathBuf {
    let run = write_tiny_run(folder);
    let text = String::from_utf8(some_text(30_000)).unwrap();
    let mut lines = zstd::Encoder::new(fs::File::create(folder.join("lines.jsonl.zst")).unwrap(), 1).unwrap();
    for paragraph in text.split("\n\n").filter(|paragraph| !paragraph.is_empty()) {
        writeln!(lines, "{}", serde_json::json!({ "body": paragraph })).unwrap();
    }
    lines.finish().unwrap();
    let config = fs::read_to_string(&run).unwrap();
    let (before, after) = config.split_once("[data]").unwrap();
    let (_, after) = after.split_once("[optimizer]").unwrap();
    let data = "[data]\n[[data.sources]]\nname = \"book\"\npaths = [\"text.txt\"]\nweight = 1.0\n\
                held_out = { tail = { fraction = 0.1 } }\n\
                [[data.sources]]\nname = \"lines\"\npaths = [\"lines.jsonl.zst\"]\ntext_field = \"body\"\nweight = 3.0\n\
                held_out = { documents = { fraction = 0.2 } }\n[optimizer]";
    fs::write(&run, format!("{before}{data}{after}")).unwrap();
    run
}

fn prepare(run: &Path, tokens: &Path, args: &[&str]) -> assert_cmd::Command {
    let mut command = photon_train(["prepare".as_ref(), run.as_os_str(), "--tokens".as_ref(), tokens.as_os_str()]);
    command.args(args);
    command
}

#[test]
fn prepare_shows_each_side_of_each_source() {
    let folder = tempfile::tempdir().unwrap();
    let run = write_mixed_run(folder.path());
    let tokens = folder.path().join("tokens");
    let text = stdout_of(prepare(&run, &tokens, &[]));
    assert_says(&text, &["tokens/byte", "book", "lines", "held out", "25.0 %", "75.0 %", "overlap: ", "content hash "]);
    let first: Value = json_of(prepare(&run, &tokens, &["--format", "json", "--verify"])).remove(0);
    assert_eq!(first["sources"][1]["origin"], "reused");
    let bytes = first["sources"][0]["train"]["text_bytes"].as_u64().unwrap();
    assert!((6_000..8_000).contains(&bytes), "{first}");
    // The first 8000 bytes are in both: the lines are held out from one source and trained on in the other.
    assert!(first["overlap"]["n_found"].as_u64().unwrap() > 0, "{first}");
    let elsewhere = json_of(prepare(&run, &folder.path().join("other"), &["--format", "json"])).remove(0);
    assert_eq!(first["content_hash"], elsewhere["content_hash"]);
}

#[test]
fn a_run_finds_what_was_prepared_and_mixes_it() {
    let folder = tempfile::tempdir().unwrap();
    let run = write_mixed_run(folder.path());
    stdout_of(prepare(&run, &folder.path().join("runs/.tokens"), &[]));
    for (name, packing) in [("stream", "stream"), ("documents", "documents")] {
        let out = folder.path().join("runs").join(name);
        let mut command = photon_train(["run".as_ref(), run.as_os_str(), "--out".as_ref(), out.as_os_str()]);
        command.args(set(CHEAP)).args(set([format!("data.packing={packing}"), "alpha=0.3".into()]));
        let assert = command.assert().success();
        let log = String::from_utf8(assert.get_output().stderr.clone()).unwrap();
        assert_says(&log, &["book, tokens reused", "lines, tokens reused"]);
    }
}

#[test]
fn documents_apart_need_rows_of_whole_chunks() {
    let folder = tempfile::tempdir().unwrap();
    let run = write_tiny_run(folder.path());
    let complaint = complaint_of(prepare(
        &run,
        folder.path(),
        &set(["data.packing=documents", "seq_len=30"]).iter().map(String::as_str).collect::<Vec<_>>(),
    ));
    assert_says(&complaint, &["seq_len = 30: must be a multiple of the product of the chunk lengths"]);
}

#[test]
fn a_document_mask_needs_documents_that_begin_with_chunks() {
    let folder = tempfile::tempdir().unwrap();
    let run = write_tiny_run(folder.path());
    let complaint = complaint_of(prepare(&run, folder.path(), &["--set", "data.document_mask=true"]));
    assert_says(&complaint, &["data.document_mask = true: needs data.packing = \"documents\" beside it"]);
}

/// A run's own held-out number, from its checkpoint and the text.
#[test]
fn eval_keeps_documents_apart_where_it_is_asked_to() {
    let folder = tempfile::tempdir().unwrap();
    let (run, out) = (write_run_of_clauses(folder.path()), folder.path().join("run"));
    let held_out = folder.path().join("held-out.jsonl");
    let lines = ["one clause", "and another that is longer than a few chunks, to fill a row", "I"];
    fs::write(&held_out, lines.map(|text| serde_json::json!({ "text": text }).to_string() + "\n").concat()).unwrap();
    let data = format!("data.sources.0.held_out={{ paths = {{ paths = [{:?}] }} }}", held_out.display().to_string());
    let mut command = photon_train(["run".as_ref(), run.as_os_str(), "--out".as_ref(), out.as_os_str()]);
    command.args(set(["steps=2", "seq_len=64", "eval.max_tokens=4096", &data, "data.sources.1.held_out=nothing"]));
    command.assert().success();
    let metrics = fs::read_to_string(out.join("metrics.jsonl")).unwrap();
    let last: Value = serde_json::from_str(metrics.lines().last().unwrap()).unwrap();
    let eval = |args: &[&str]| {
        let mut command =
            photon_train(["eval".as_ref(), out.join("checkpoints/last").as_os_str(), held_out.as_os_str()]);
        command.args(["--seq-len", "64", "--format", "json"]).args(args);
        json_of(command).remove(0)
    };
    let (found, expected) = (eval(&["--document-mask"]), &last["held_out"]);
    assert_eq!(found["n_tokens"], expected["n_tokens"]);
    let nats = |line: &Value| number(line, "nats_per_token");
    assert!((nats(&found) - nats(expected)).abs() < 1e-6, "{found}, the run said {expected}");
    assert_ne!(nats(&eval(&[])), nats(&found));
    let mut command = photon_train(["eval".as_ref(), out.join("checkpoints/last").as_os_str(), held_out.as_os_str()]);
    command.args(["--seq-len", "62", "--document-mask"]);
    assert_says(&complaint_of(command), &["--seq-len 62: must be a multiple of 4"]);
}

#[test]
fn a_damaged_shard_is_named_with_what_to_do() {
    let folder = tempfile::tempdir().unwrap();
    let run = write_tiny_run(folder.path());
    let tokens = folder.path().join("tokens");
    let report: Value = json_of(prepare(&run, &tokens, &["--format", "json"])).remove(0);
    let shard = Path::new(report["sources"][0]["folder"].as_str().unwrap()).join("train-00000.tokens");
    let mut bytes = fs::read(&shard).unwrap();
    bytes[500] ^= 1;
    fs::remove_file(&shard).unwrap();
    fs::write(&shard, bytes).unwrap();
    let complaint = complaint_of(prepare(&run, &tokens, &[]));
    assert_says(&complaint, &["train-00000.tokens: hash of the contents is", "delete the file, it is made again"]);
    fs::remove_file(&shard).unwrap();
    let again: Value = json_of(prepare(&run, &tokens, &["--format", "json"])).remove(0);
    assert_eq!(
        (&again["content_hash"], &again["sources"][0]["origin"]),
        (&report["content_hash"], &Value::from("completed"))
    );
}
