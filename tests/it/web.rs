//! What the page generates by, without a page: in steps, on the CPU, which never lets one wait.

use std::path::Path;
use std::pin::pin;
use std::task::{Context, Poll, Waker};

use photon_core::checkpoint::CheckpointFiles;
use photon_core::device::{DeviceChoice, OpenDevice};
use photon_core::sampler::SamplingConfig;
use photon_infer::generate::FinishReason;
use photon_web::runner::{Outcome, Progress, Request, RunError, Runner};

use crate::programs::{photon_infer, stdout_of, tiny_checkpoint};

const TOKENS: usize = 24;

fn ready<T>(future: impl Future<Output = T>) -> T {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(value) => value,
        Poll::Pending => panic!("the CPU has nothing to wait for"),
    }
}

fn files(folder: &Path) -> CheckpointFiles {
    let read = |name: &str| std::fs::read(folder.join(name)).unwrap();
    CheckpointFiles {
        config: String::from_utf8(read("config.toml")).unwrap(),
        tokenizer: read("tokenizer.json"),
        weights: read("model.safetensors"),
    }
}

fn runner() -> Runner {
    Runner::load(files(tiny_checkpoint()), DeviceChoice::Cpu.open().unwrap()).unwrap()
}

fn request(preset: &str) -> Request {
    let sampling = SamplingConfig { temperature: 0.8, top_k: None, top_p: Some(0.9), seed: 3 };
    Request { prompt: "Call me".into(), preset: preset.into(), max_tokens: TOKENS, sampling }
}

/// What came of it, and what was told on the way; it stops after `most` tokens.
fn generate(runner: &Runner, request: Request, most: usize) -> Result<(Outcome, Vec<Progress>), RunError> {
    let mut heard = Vec::new();
    let outcome = ready(runner.generate(request, async |progress: Progress| {
        heard.push(progress);
        heard.len() < most
    }))?;
    Ok((outcome, heard))
}

#[test]
fn the_page_generates_what_the_program_prints() {
    let runner = runner();
    for preset in ["exact", "exact-int8"] {
        let (outcome, heard) = generate(&runner, request(preset), usize::MAX).unwrap();
        let mut command = photon_infer(["generate", "--prompt", "Call me", "--seed", "3", "--top-p", "0.9"]);
        command.args(["--max-tokens", &TOKENS.to_string(), "--preset", preset, "--model"]).arg(tiny_checkpoint());
        assert_eq!(format!("Call me{}\n", outcome.text), stdout_of(command));
        assert_eq!(heard.iter().map(|progress| progress.text.as_str()).collect::<String>(), outcome.text);
        assert_eq!((outcome.tokens, outcome.finish_reason), (TOKENS, Some(FinishReason::Length)));
        assert_eq!(heard.iter().map(|progress| progress.tokens).collect::<Vec<_>>(), (1..=TOKENS).collect::<Vec<_>>());
        let bytes = |progress: &Progress| progress.caches.iter().map(|stage| stage.used_bytes).sum::<usize>();
        assert!(heard[0].prompt_tokens == 7 && bytes(&heard[TOKENS - 1]) > bytes(&heard[0]), "{heard:?}");
    }
}

#[test]
fn whoever_is_told_can_stop_it() {
    let runner = runner();
    let (whole, _) = generate(&runner, request("exact"), usize::MAX).unwrap();
    let (outcome, heard) = generate(&runner, request("exact"), 5).unwrap();
    assert_eq!((outcome.tokens, outcome.finish_reason, heard.len()), (5, None, 5));
    assert!(whole.text.starts_with(&outcome.text), "{outcome:?} {whole:?}");
}

#[test]
fn files_in_memory_are_checked_as_those_on_disk() {
    let complaint = |files| {
        let device = DeviceChoice::Cpu.open().unwrap();
        Runner::load(files, device).unwrap_err().to_string()
    };
    let sound = files(tiny_checkpoint());
    let mut cut = sound.clone();
    cut.weights.truncate(cut.weights.len() - 8);
    assert!(complaint(cut).contains("model.safetensors is damaged"));
    let other = sound.config.replacen("vocab_size = 257", "vocab_size = 258", 1);
    assert_ne!(other, sound.config);
    let said = complaint(CheckpointFiles { config: other, ..sound.clone() });
    assert!(said.contains("the tokenizer has 257 entries, the model's vocab_size is 258"), "{said}");
    let said = complaint(CheckpointFiles { config: "architecture = 3".into(), ..sound });
    assert!(said.starts_with("config.toml: "), "{said}");
}

#[test]
fn presets_that_a_card_would_be_waited_for_are_refused_there() {
    let of_cpu = runner();
    assert!(of_cpu.presets().iter().all(|preset| preset.refused.is_none()), "{:?}", of_cpu.presets());
    // Only its name is asked for here.
    let cpu = DeviceChoice::Cpu.open().unwrap();
    let card = OpenDevice { name: "wgpu", adapter: Some("a card".into()), ..cpu };
    let of_card = Runner::load(files(tiny_checkpoint()), card).unwrap();
    let refused = of_card.presets().into_iter().filter(|preset| preset.refused.is_some());
    let refused: Vec<_> = refused.map(|preset| (preset.name, preset.refused.unwrap())).collect();
    assert!(!refused.is_empty() && refused.len() < of_card.presets().len(), "{refused:?}");
    for (name, reason) in refused {
        assert!(reason.contains("from wgpu (a card) in the midst of a step"), "{name}: {reason}");
        let Err(error) = generate(&of_card, request(name), usize::MAX) else { panic!("{name} is refused") };
        assert_eq!(error.to_string(), reason);
    }
    assert!(generate(&of_card, request("exact"), usize::MAX).is_ok());
}
