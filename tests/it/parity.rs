//! `photon-infer parity` through the real program. What it finds where devices differ is tested beside it.

use crate::programs::{assert_says, complaint_of, json_of, photon_infer, shipped_text, stdout_of, tiny_checkpoint};

fn parity(args: &[&str]) -> assert_cmd::Command {
    let mut command = photon_infer(["parity", "--context", "32", "--greedy-tokens", "8", "--model"]);
    command.arg(tiny_checkpoint()).arg("--text").arg(shipped_text()).args(args);
    if !args.contains(&"--prompt") {
        command.args(["--prompt", "14"]);
    }
    command
}

#[test]
fn a_device_is_compared_with_the_reference_part_by_part() {
    let json = json_of(parity(&["--devices", "cpu,cpu,cpu", "--preset", "exact,int4", "--format", "json"])).remove(0);
    let lines = json.as_array().unwrap();
    assert_eq!(lines.len(), 2, "the first is the reference");
    let parts = lines[0]["parts"].as_array().unwrap();
    assert_eq!((&parts[0]["part"], &parts[parts.len() - 1]["part"]), (&"decoder embedding".into(), &"head".into()));
    assert!(parts.iter().all(|part| part["alone"] == 0.0 && part["largest"].as_f64().unwrap() > 0.0), "{json}");
    let paths = lines[0]["predictions"].as_array().unwrap();
    assert_eq!(paths.iter().map(|path| &path["path"]).collect::<Vec<_>>(), ["training forward", "exact", "int4"]);
    assert!(paths.iter().all(|path| path["logit_difference"] == 0.0 && path["top1_agreement"] == 1.0), "{json}");
    assert_eq!(paths[2]["greedy_tokens"], 8);

    let printed = stdout_of(parity(&["--devices", "cpu,cpu"]));
    assert_says(&printed, &["differences from cpu", "| chunker 2 ", "| head ", "| training forward ", "8 of 8"]);
}

#[test]
fn the_cost_of_fewer_bits_is_measured_on_any_device() {
    let args = ["--devices", "cpu,cpu", "--weights", "bf16", "--tolerance", "0.1", "--format", "json"];
    let json = json_of(parity(&args)).remove(0);
    let kl = json[0]["predictions"][0]["kl_mean_nats"].as_f64().unwrap();
    assert!(kl > 1e-9 && kl < 1e-2, "{json}");
    assert_says(&complaint_of(parity(&args[..4])), &["cpu differs from cpu by more than 0.0001"]);
}

#[test]
fn what_cannot_be_compared_is_named() {
    for (args, said) in [
        (&["--devices", "cpu"][..], "--devices names one device: name the reference and another"),
        (&["--devices", "cpu,gpu"], "unknown device \"gpu\""),
        (&["--devices", "cpu,cpu", "--prompt", "32"], "--prompt 32: must be less than --context 32"),
        (&["--devices", "cpu,cpu", "--tolerance", "nan"], "--tolerance NaN: must be 0 or more"),
        (&["--devices", "cpu,cpu", "--weights", "int8"], "unknown format \"int8\": use f32, bf16 or f16"),
        (&["--devices", "cpu,cpu", "--preset", "exat"], "preset exat: there is no such preset"),
    ] {
        assert_says(&complaint_of(parity(args)), &[said]);
    }
}
