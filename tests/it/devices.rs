//! The WebGPU device beside the CPU: the same model code, the same numbers.
//!
//! `check` runs these tests where there is an adapter, a software driver included; elsewhere it says that they are left
//! out.

use std::sync::OnceLock;

use burn::tensor::{Device, Tensor, TensorData};
use photon_core::cache::entries::{Entries, EntryFormat, Packed};
use photon_core::cache::pack::pack;
use photon_core::config::ModelConfig;
use photon_core::device::{DeviceChoice, OpenDevice};
use photon_core::launches::counted;
use photon_core::model::Model;
use photon_train::config::OptimizerConfig;
use photon_train::data::Batch;
use photon_train::replicas::Replicas;
use photon_train::step::Learner;
use serde_json::Value;

use crate::caches::{PLANS, plan};
use crate::programs::{
    assert_says, complaint_of, json_of, photon_infer, photon_train, shipped_text, stdout_of, tiny_checkpoint,
    write_tiny_run,
};
use crate::runs::number;
use crate::support::{
    Case, PICKED, STRIDED, flat_case, forward, max_difference, photon_case, random_rows, rows_of, shaken,
};

/// f32, sums in another order, a few layers deep.
const TOLERANCE: f32 = 1e-4;

/// Numbers that differ in their last bit may be rounded to codes that differ by one.
const PACKED_TOLERANCE: f32 = 2e-2;

fn wgpu() -> &'static OpenDevice {
    static DEVICE: OnceLock<OpenDevice> = OnceLock::new();
    DEVICE.get_or_init(|| DeviceChoice::Wgpu.open().unwrap_or_else(|error| panic!("{error}")))
}

/// One of each: kinds of attention, numbers of levels.
fn cases() -> Vec<Case> {
    vec![
        flat_case("\"full\""),
        flat_case(STRIDED),
        flat_case(PICKED),
        photon_case(1, "\"full\"", "\"chunk\""),
        photon_case(2, "\"block\"", "{ lookback = { chunks = 1 } }"),
        photon_case(3, "{ window = { units = 2 } }", "{ stream = { window = 5 } }"),
    ]
}

/// A command on the tiny checkpoint and the shipped text.
fn on_text(command: &str, args: &[&str]) -> assert_cmd::Command {
    let mut command = photon_infer([command, "--context", "48", "--prompt", "14", "--model"]);
    command.arg(tiny_checkpoint()).arg("--text").arg(shipped_text()).args(args);
    command
}

#[test]
#[ignore = "needs a WebGPU adapter: `check` runs it where there is one"]
fn every_part_and_every_path_agrees_with_the_cpu() {
    let presets = "exact,exact-int8,int4";
    let args = ["--devices", "cpu,wgpu", "--greedy-tokens", "8", "--preset", presets, "--format", "json"];
    let json = json_of(on_text("parity", &args)).remove(0);
    for part in json[0]["parts"].as_array().unwrap() {
        let most = 1e-5 * number(part, "largest").max(1.0);
        assert!(number(part, "alone") < most && number(part, "along") < 10.0 * most, "{part}");
    }
    let paths = json[0]["predictions"].as_array().unwrap();
    for (path, most) in paths.iter().zip([1e-4, 1e-4, 1e-2, 1e-1]) {
        assert!(number(path, "logit_difference") < most && number(path, "kl_max_nats") < most, "{path}");
    }
    assert!(paths[..2].iter().all(|path| path["top1_agreement"] == 1.0), "{json}");
    assert_eq!(paths[1]["greedy_tokens"], 8, "{json}");
}

#[test]
#[ignore = "needs a WebGPU adapter: `check` runs it where there is one"]
fn generation_there_is_the_training_forward_there_and_here() {
    for case in cases() {
        let [here, there] = [&Device::flex(), &wgpu().device].map(|device| shaken(&case.config, device));
        let n_tokens = 2 * case.config.meta_chunk_tokens().max(6) + 1;
        let rows = random_rows(1, n_tokens + 1, 61);
        let [expected, found] = [&here, &there].map(|model| forward(model, &rows).remove(0));
        let difference = max_difference(&found.concat(), &expected.concat());
        assert!(difference <= TOLERANCE, "{}: training forward: {difference}", case.name);
        for prompt_len in [1, n_tokens / 2] {
            let (mut state, _) = there.begin(1);
            let mut logits = rows_of(there.extend(&mut state, &[0], &[rows[0][..prompt_len].to_vec()]));
            for position in prompt_len..n_tokens {
                let difference = max_difference(&logits[0], &found[position]);
                let place = format!("prompt of {prompt_len}, position {position}");
                assert!(difference <= TOLERANCE, "{}, {place}: {difference}", case.name);
                logits = rows_of(there.extend(&mut state, &[0], &[vec![rows[0][position]]]));
            }
        }
    }
}

#[test]
#[ignore = "needs a WebGPU adapter: `check` runs it where there is one"]
fn caches_of_every_plan_give_there_what_they_give_here() {
    let case = photon_case(2, "\"full\"", "{ stream = { window = 5 } }");
    let [here, there] = [&Device::flex(), &wgpu().device].map(|device| shaken(&case.config, device));
    let tokens = random_rows(1, 26, 62).remove(0);
    let mut n_compared = 0;
    for (name, toml) in PLANS {
        let plan = plan(toml, &case.config);
        if plan.check_formats(wgpu()).is_err() {
            continue;
        }
        n_compared += 1;
        let [expected, found] = [&here, &there].map(|model| {
            let (mut state, _) = model.begin_with(1, &plan);
            let mut logits = rows_of(model.extend(&mut state, &[0], &[tokens[..17].to_vec()])).remove(0);
            for &token in &tokens[17..] {
                logits.extend(rows_of(model.extend(&mut state, &[0], &[vec![token]])).remove(0));
            }
            logits
        });
        let is_packed = name.contains("int") || name == "residual";
        let difference = max_difference(&found, &expected);
        assert!(difference <= if is_packed { PACKED_TOLERANCE } else { TOLERANCE }, "{name}: {difference}");
    }
    // One plan stores bf16, which software drivers do not know.
    assert!(n_compared + 1 >= PLANS.len(), "{n_compared} plans");
}

#[test]
#[ignore = "needs a WebGPU adapter: `check` runs it where there is one"]
fn packed_entries_are_the_same_to_the_bit() {
    let values: Vec<f32> =
        random_rows(1, 2 * 3 * 5 * 52, 63).concat().iter().map(|&id| id as f32 / 3.7 - 1.9).collect();
    let data = TensorData::new(values, [2, 3, 5, 52]);
    for format in [EntryFormat::Int8 { group: 52 }, EntryFormat::Int4 { group: 26 }, EntryFormat::Int4 { group: 52 }] {
        let bits = |device: &Device| match pack(Tensor::from_data(data.clone(), device), format) {
            Entries::Packed(Packed { codes, params, .. }) => {
                let codes: Vec<i64> = codes.try_to_vec_as().unwrap();
                let params: Vec<f32> = params.try_to_vec_as().unwrap();
                // The sign of a word does not matter.
                (codes.into_iter().map(|code| code as u32).collect::<Vec<_>>(), params)
            }
            Entries::Dense(_) => panic!("{format:?} is packed"),
        };
        let ((codes, params), (found_codes, found_params)) = (bits(&Device::flex()), bits(&wgpu().device));
        assert_eq!(found_params, params, "{format:?}");
        assert_eq!(found_codes, codes, "{format:?}");
    }
}

/// Losses of updates on the same rows.
fn losses(config: &ModelConfig, device: &OpenDevice, checkpointing: bool, n_steps: usize) -> Vec<f64> {
    let mut model = Model::new(config, 1, &device.with_gradients(checkpointing));
    let mut learner = Learner::new(&model, &OptimizerConfig::default(), 0.1, 2, Replicas::new(1).unwrap());
    let mut batch = Batch::full(random_rows(2, 12, 64).concat(), 12);
    batch.lens[1] = 7;
    let mut losses = Vec::new();
    for _ in 0..n_steps {
        let update;
        (model, update) = learner.learn(model, &batch, 1e-2);
        losses.push(update.cross_entropy_nats);
    }
    losses
}

#[test]
#[ignore = "needs a WebGPU adapter: `check` runs it where there is one"]
fn training_there_takes_the_steps_that_it_takes_here() {
    let cpu = DeviceChoice::Cpu.open().unwrap();
    for case in [photon_case(2, "\"full\"", "{ stream = { window = 5 } }"), flat_case("\"full\"")] {
        let expected = losses(&case.config, &cpu, false, 6);
        assert!(expected[5] < expected[0], "{expected:?}");
        for checkpointing in [false, true] {
            let found = losses(&case.config, wgpu(), checkpointing, 6);
            for (found, expected) in found.iter().zip(&expected) {
                assert!((found - expected).abs() < 1e-4, "{}: {found} {expected}", case.name);
            }
        }
    }
}

#[test]
#[ignore = "needs a WebGPU adapter: `check` runs it where there is one"]
fn a_checkpoint_of_one_device_serves_and_goes_on_on_the_other() {
    let folder = tempfile::tempdir().unwrap();
    let config = write_tiny_run(folder.path());
    let out = folder.path().join("run");
    let train = |device: &str, steps: usize| {
        let mut command = photon_train(["run".as_ref(), config.as_os_str()]);
        command.args(["--set", "eval.every_steps=2", "--set", &format!("steps={steps}"), "--device", device]);
        command.args(["--set", "eval.max_tokens=64", "--resume", "--out"]).arg(&out);
        stdout_of(command)
    };
    train("wgpu", 2);
    let last = out.join("checkpoints/last");
    let bits_per_byte = |device: &str| {
        let mut command = photon_train(["eval", "--device", device, "--seq-len", "32", "--format", "json"]);
        command.arg(&last).arg(folder.path().join("text.txt")).args(["--max-tokens", "96"]);
        number(&json_of(command)[0], "bits_per_byte")
    };
    let (here, there) = (bits_per_byte("cpu"), bits_per_byte("wgpu"));
    assert!((here - there).abs() < 1e-5 * here, "{here} {there}");
    assert_says(&train("cpu", 4), &["after 4 steps"]);
}

#[test]
#[ignore = "needs a WebGPU adapter: `check` runs it where there is one"]
fn the_fidelity_report_there_is_that_of_here() {
    let report = |device: &str| {
        let presets = "exact,exact-int8";
        let args = ["--preset", presets, "--max-tokens", "96", "--device", device, "--format", "json"];
        json_of(on_text("fidelity", &args)).remove(0)
    };
    let [here, there] = ["cpu", "wgpu"].map(report);
    let lines = |json: &Value| json.as_array().unwrap().clone();
    for (here, there) in lines(&here).iter().zip(&lines(&there)) {
        assert_eq!(there["caches"], here["caches"], "entries and bytes are no matter of the device");
        for key in ["forward_bits_per_byte", "cached_bits_per_byte"] {
            let difference = (number(here, key) - number(there, key)).abs();
            assert!(difference < 1e-4, "{key}: {here} {there}");
        }
        assert!((number(here, "kl_mean_nats") - number(there, "kl_mean_nats")).abs() < 1e-5, "{here} {there}");
    }
}

/// Bytes of live tensors on the device.
fn bytes_in_use() -> u64 {
    let device = &wgpu().device;
    device.sync().unwrap();
    device.memory_pool_usage().unwrap().bytes_in_use
}

/// Counts what the whole device holds, so it runs in a process of its own.
#[test]
#[ignore = "runs in a process of its own, of the test below that has its name"]
fn memory_alone() {
    let case = photon_case(2, "{ window = { units = 2 } }", "{ stream = { window = 5 } }");
    let mut model = Model::new(&case.config, 1, &wgpu().with_gradients(false));
    let mut learner = Learner::new(&model, &OptimizerConfig::default(), 0.1, 2, Replicas::new(1).unwrap());
    let batch = Batch::full(random_rows(2, 12, 65).concat(), 12);
    let mut after = Vec::new();
    for step in 0..24 {
        (model, _) = learner.learn(model, &batch, 1e-3);
        if step >= 8 {
            after.push(bytes_in_use());
        }
    }
    assert!(after.iter().all(|bytes| bytes == after.first().unwrap()), "training: {after:?}");
    drop((model, learner));

    let model = shaken(&case.config, &wgpu().device);
    let plan = plan("", &case.config);
    let (mut state, _) = model.begin_with(1, &plan);
    let mut after = Vec::new();
    for step in 0..96_u32 {
        drop(model.extend(&mut state, &[0], &[vec![step % 13]]));
        if step % 12 == 11 {
            // The top cache is full and grows with the text; the others have windows.
            after
                .push(bytes_in_use() - state.cache_use().iter().map(|stage| stage.allocated_bytes as u64).sum::<u64>());
        }
    }
    let (least, most) = (after[2..].iter().min().unwrap(), after[2..].iter().max().unwrap());
    assert!(most - least <= 4096, "generation: {after:?}");
}

/// Counts what the whole process launches, so it runs in one of its own.
#[test]
#[ignore = "runs in a process of its own, of the test below that has its name"]
fn launches_alone() {
    // Windows everywhere but at the top, which has one entry for six tokens: after a while no cache grows.
    let case = photon_case(2, "{ window = { units = 2 } }", "{ stream = { window = 5 } }");
    let model = shaken(&case.config, &wgpu().device);
    let chunk = case.config.meta_chunk_tokens() as u32;
    let (mut state, _) = model.begin(1);
    let mut of_chunk = |tokens: std::ops::Range<u32>| {
        let each = tokens.map(|token| {
            let (_, launches) = counted(|| model.extend(&mut state, &[0], &[vec![token % 13]]));
            launches.values().sum::<usize>()
        });
        each.collect::<Vec<_>>()
    };
    let chunks: Vec<Vec<usize>> = (0..12).map(|index| of_chunk(index * chunk..(index + 1) * chunk)).collect();
    // A cache that grows launches a few more.
    let sums: Vec<usize> = chunks[4..].iter().map(|chunk| chunk.iter().sum()).collect();
    let (least, most) = (sums.iter().min().unwrap(), sums.iter().max().unwrap());
    assert!(*least > 0 && most - least <= least / 10, "launches of chunks: {chunks:?}");
    // Where no chunk ends, one decoder works alone.
    assert!(chunks[8][0] < chunks[8][chunk as usize - 1], "{chunks:?}");
}

/// Runs a test in a process of its own.
fn passes_alone(test: &str) {
    let mut command = std::process::Command::new(std::env::current_exe().unwrap());
    let output = command.args(["--exact", "--ignored", test]).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
}

#[test]
#[ignore = "needs a WebGPU adapter: `check` runs it where there is one"]
fn memory_of_the_device_is_flat() {
    passes_alone("devices::memory_alone");
}

#[test]
#[ignore = "needs a WebGPU adapter: `check` runs it where there is one"]
fn a_chunk_costs_a_fixed_number_of_launches() {
    passes_alone("devices::launches_alone");
}

#[test]
#[ignore = "needs a WebGPU adapter: `check` runs it where there is one"]
fn numbers_that_the_adapter_lacks_are_refused_by_name() {
    let device = wgpu();
    let listed = json_of(photon_infer(["devices", "--format", "json"])).remove(0);
    let line = listed.as_array().unwrap().iter().find(|line| line["device"] == "wgpu").unwrap();
    assert_eq!(line["adapter"].as_str(), device.adapter.as_deref(), "{listed}");
    for numbers in ["f16", "bf16"] {
        let mut command = photon_infer(["generate", "--device", "wgpu", "--max-tokens", "1", "--set"]);
        command.arg(format!("caches=[{{ stages = \"all\", values = \"{numbers}\" }}]"));
        command.arg("--model").arg(tiny_checkpoint());
        match line[numbers] == true {
            true => drop(stdout_of(command)),
            false => assert_says(&complaint_of(command), &[&format!("{device} has no {numbers}: use one of f32")]),
        }
    }
}
