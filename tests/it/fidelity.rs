//! `photon-infer fidelity` through the real program: what is exact shows as exact, what rounds shows how much.

use serde_json::Value;

use crate::programs::{
    assert_says, complaint_of, json_of, photon_infer, photon_train, shipped_text, some_text, stdout_of, tiny_checkpoint,
};

/// Forward and cached path sum in another order, in f32: logits differ by some 1e-5, their divergence by the square.
const ROUNDING_NATS: f64 = 1e-8;

fn fidelity(args: &[&str]) -> assert_cmd::Command {
    let mut command = photon_infer(["fidelity", "--device", "cpu", "--model"]);
    command.arg(tiny_checkpoint()).arg("--text").arg(shipped_text());
    let sizes = [("--context", "64"), ("--prompt", "14"), ("--max-tokens", "192"), ("--batch", "2")];
    for (option, value) in sizes.iter().filter(|(option, _)| !args.contains(option)) {
        command.args([option, value]);
    }
    command.args(args);
    command
}

fn number(line: &Value, key: &str) -> f64 {
    line[key].as_f64().unwrap_or_else(|| panic!("{key}: {line}"))
}

#[test]
fn presets_stand_where_their_storage_puts_them() {
    let presets = "exact,bounded,f16,exact-int8,int4,recursive";
    let json = json_of(fidelity(&["--preset", presets, "--format", "json"])).remove(0);
    let lines = json.as_array().unwrap();
    assert_eq!(lines.iter().map(|line| line["preset"].as_str().unwrap()).collect::<Vec<_>>().join(","), presets);
    let [exact, bounded, f16, int8, int4, recursive] = std::array::from_fn(|index| &lines[index]);

    for line in [exact, bounded] {
        assert!(number(line, "kl_max_nats") < ROUNDING_NATS, "{line}");
        assert_eq!(line["top1_agreement"], 1.0, "{line}");
        assert!(number(line, "bits_per_byte_change").abs() < 1e-6, "{line}");
    }
    // Two whole windows in the first batch, one in the second.
    assert_eq!(exact["n_tokens"], 3 * (64 - 14));
    let kl = |line| number(line, "kl_mean_nats");
    assert!(kl(exact) < kl(f16) && kl(f16) < kl(int8) && kl(int8) < kl(int4), "{json}");
    assert!(kl(int4) < kl(recursive), "{json}");
    for line in lines {
        let expected = if line["preset"] == "recursive" { "no" } else { "yes" };
        assert_eq!(line["feedback"], expected, "{line}");
        assert_eq!(line["forward_bits_per_byte"], exact["forward_bits_per_byte"], "one forward for all");
        assert!(number(line, "kl_p99_nats") <= number(line, "kl_max_nats"), "{line}");
        let used: f64 = line["caches"].as_array().unwrap().iter().map(|stage| number(stage, "used_bytes")).sum();
        assert_eq!(used, number(line, "used_bytes"), "{line}");
        assert_eq!(number(line, "bytes_per_token"), used / 64.0);
        assert!(used <= number(line, "allocated_bytes"), "{line}");
    }
    let share = |line| number(line, "share_of_f16");
    assert_eq!((share(f16), share(exact)), (1.0, 2.0));
    assert!(share(int4) < share(int8) && share(int8) < 1.0, "{json}");
}

#[test]
fn bits_per_byte_are_those_of_the_evaluation() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("t.txt");
    std::fs::write(&path, &some_text(200)[..192]).unwrap();
    let path = path.display().to_string();
    let mut command = photon_infer(["fidelity", "--text", &path, "--context", "64", "--prompt", "0", "--model"]);
    command.arg(tiny_checkpoint()).args(["--format", "json"]);
    let ours = number(&json_of(command)[0][0], "forward_bits_per_byte");
    let mut command = photon_train(["eval", "--format", "json", "--seq-len", "64"]);
    command.arg(tiny_checkpoint()).args([&path, "--max-tokens", "192"]);
    let theirs = number(&json_of(command)[0], "bits_per_byte");
    assert!((ours - theirs).abs() < 1e-4 * theirs, "{ours} {theirs}");
}

#[test]
fn a_table_is_printed_and_exact_is_measured_unasked() {
    let printed = stdout_of(fidelity(&[]));
    let parts =
        ["150 predictions in 3 windows of 64 tokens", "| exact ", "KL mean", "100.00 %", "yes", "encoder 2", "total"];
    assert_says(&printed, &parts);
    // Decoder 1 looks back 11 positions, four chunks: nothing is left of a short window.
    assert_says(&stdout_of(fidelity(&["--context", "24"])), &["window too short"]);
}

#[test]
fn what_cannot_be_measured_is_named() {
    for (args, said) in [
        (&["--preset", "exat"][..], "preset exat: there is no such preset or file; use one of exact, bounded,"),
        (&["--context", "4000000"], "one window takes 4000000: give more text or a shorter context"),
        (&["--prompt", "64"], "--prompt 64: must be less than --context 64"),
        (&["--set", "caches.0.keys=int3"], "preset exact: at `caches[0].keys`: unknown variant `int3`"),
    ] {
        assert_says(&complaint_of(fidelity(args)), &[said]);
    }
    let mut command = photon_infer(["fidelity", "--text", "no/such.txt", "--model"]);
    command.arg(tiny_checkpoint());
    assert_says(&complaint_of(command), &["cannot read the text no/such.txt"]);
}
