//! `photon-infer generate`.

use std::io::Write;
use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use photon_core::device::DeviceChoice;
use photon_core::nn::compute::Compute;
use photon_core::sampler::SamplingConfig;
use photon_core::state::CacheUse;
use photon_infer::generate::{Completion, GenerateConfig, Generation, generate};
use photon_infer::presets::DEFAULT_PRESET;

use super::{Format, load, log, open_device, parse_positive, plan, table};

#[derive(Args)]
pub(super) struct GenerateArgs {
    /// Folder with model.safetensors, config.toml and tokenizer.json.
    #[arg(long)]
    model: PathBuf,
    /// What to continue; several make a batch. Without one the model begins by itself.
    #[arg(long)]
    prompt: Vec<String>,
    /// Tokens to generate for each prompt.
    #[arg(long, default_value_t = 256)]
    max_tokens: usize,
    /// Continuations of each prompt, which share the caches of the prompt. Rows are counted prompt by prompt:
    /// sample s of prompt p is row p * N + s. The seed and the row decide the choices.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = parse_positive)]
    samples: usize,
    /// 0 takes the likeliest token; higher is more varied.
    #[arg(long, default_value_t = 0.8)]
    temperature: f64,
    /// Choose among this many likeliest tokens only.
    #[arg(long)]
    top_k: Option<usize>,
    /// Choose among the likeliest tokens that hold this share of the probability only.
    #[arg(long)]
    top_p: Option<f64>,
    /// Decides the choices.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// End a text before this one; may be given several times.
    #[arg(long)]
    stop: Vec<String>,
    /// How caches store and keep entries: a name that `photon-infer presets` lists, or a TOML file.
    #[arg(long, value_name = "NAME-OR-FILE", default_value = DEFAULT_PRESET)]
    preset: String,
    /// Change a key of the preset, as key.path=value; may be given several times.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// Say at the end what the caches held and did: on stderr, or as a last JSON object.
    #[arg(long)]
    stats: bool,
    /// How the matrices are stored and multiplied: f32, bf16 or f16.
    #[arg(long, value_name = "FORMAT", default_value_t = Compute::F32)]
    weights: Compute,
    /// auto, cpu, cuda or wgpu.
    #[arg(long, default_value = "auto")]
    device: DeviceChoice,
    /// How to print: text as it comes, or one JSON object a row.
    #[arg(long, value_enum, default_value_t = Format::Text)]
    format: Format,
}

pub(super) fn run(args: GenerateArgs) -> Result<()> {
    let GenerateArgs { temperature, top_k, top_p, seed, max_tokens, samples, stats, format, .. } = args;
    let sampling = SamplingConfig { temperature, top_k, top_p, seed };
    sampling.validate()?;
    let device = open_device(args.device)?;
    let checkpoint = load(&args.model, &device, args.weights)?;
    let plan = plan(&args.preset, &args.set, &checkpoint.model.config(), &device)?;
    let prompts = if args.prompt.is_empty() { vec![String::new()] } else { args.prompt };
    let config = GenerateConfig { max_tokens, sampling, stops: args.stop, samples, plan };
    let mut out = std::io::stdout().lock();
    let is_stream = format == Format::Text && prompts.len() * samples == 1;
    if is_stream {
        write!(out, "{}", prompts[0])?;
    }
    let Generation { completions, caches, reliefs, refusal } =
        generate(&checkpoint, &prompts, &config, &mut |_, text| match is_stream {
            true => write!(out, "{text}").and_then(|()| out.flush()),
            false => Ok(()),
        })?;
    let rows = || completions.iter().enumerate().map(|(row, completion)| (row, &prompts[row / samples], completion));
    match format {
        Format::Text if is_stream => writeln!(out)?,
        Format::Text => {
            for (row, prompt, completion) in rows() {
                writeln!(out, "--- {row}\n{prompt}{}\n", completion.text)?;
            }
        }
        Format::Json => {
            for (row, prompt, completion) in rows() {
                writeln!(out, "{}", completion_json(prompt, row % samples, completion))?;
            }
        }
    }
    match format {
        _ if !stats => {}
        Format::Text => {
            log(stats_table(&caches, &config));
            if caches.iter().any(|stage| stage.offload.is_some()) {
                log(offload_table(&caches));
            }
        }
        Format::Json => {
            let caches = std::iter::zip(&caches, &config.plan.caches).map(|(stage, planned)| {
                let mut value = serde_json::to_value(stage)?;
                value["storage"] = storage(planned).into();
                value["policy"] = planned.config.policy.name().into();
                Ok(value)
            });
            writeln!(out, "{}", serde_json::json!({ "caches": caches.collect::<Result<Vec<_>>>()? }))?;
        }
    }
    reliefs.iter().for_each(log);
    match refusal {
        Some(refusal) => Err(refusal.into()),
        None => Ok(()),
    }
}

fn completion_json(prompt: &str, sample: usize, completion: &Completion) -> serde_json::Value {
    serde_json::json!({
        "prompt": prompt,
        "sample": sample,
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "prompt_tokens": completion.prompt_tokens,
        "completion_tokens": completion.token_ids.len(),
        "token_ids": completion.token_ids,
    })
}

fn stats_table(caches: &[CacheUse], config: &GenerateConfig) -> comfy_table::Table {
    let mut table = table(&[
        "cache",
        "storage",
        "policy",
        "entries/row",
        "bytes used",
        "shared",
        "allocated",
        "notes",
        "written",
        "evicted",
        "storing, ms",
    ]);
    for (stage, planned) in caches.iter().zip(&config.plan.caches) {
        let names = [stage.stage.clone(), storage(planned), planned.config.policy.name().to_owned()];
        let numbers = [
            stage.entries,
            stage.used_bytes,
            stage.shared_bytes,
            stage.allocated_bytes,
            stage.notes_bytes,
            stage.written_entries,
            stage.evicted_entries,
        ];
        let milliseconds = format!("{:.2}", stage.storing_secs * 1e3);
        table.add_row(names.into_iter().chain(numbers.map(|n| n.to_string())).chain([milliseconds]));
    }
    table
}

/// What went to host memory and came back, for the stages that have a tier of it.
fn offload_table(caches: &[CacheUse]) -> comfy_table::Table {
    let mut table = table(&["offloaded", "host bytes", "hits", "misses", "hit rate", "prefetched", "of them used"]);
    for (stage, offload) in caches.iter().filter_map(|stage| Some((&stage.stage, stage.offload?))) {
        let hit_rate = offload.hit_rate().map_or("-".to_owned(), |rate| format!("{rate:.3}"));
        let counts = [offload.host_bytes, offload.hits, offload.misses].map(|n| n.to_string());
        let ahead = [offload.prefetched, offload.prefetches_used].map(|n| n.to_string());
        table.add_row([stage.clone()].into_iter().chain(counts).chain([hit_rate]).chain(ahead));
    }
    table
}

/// Keys and values.
fn storage(planned: &photon_core::infer_config::StageCache) -> String {
    let name = |storage| format!("{storage:?}").to_lowercase();
    format!("{}/{}", name(planned.config.keys), name(planned.config.values))
}
