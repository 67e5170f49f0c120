//! `photon-train info`.

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use photon_core::accounting::{CacheDtype, cache_cost, model_cost};
use photon_core::config_file;

use super::{Format, grouped, print, table};

#[derive(Args)]
pub(super) struct InfoArgs {
    /// A model config.
    config: PathBuf,
    /// Change a key of the config, as key.path=value; may be given several times.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// Tokens of a sequence: attention costs more in longer ones.
    #[arg(long, default_value_t = 2048)]
    seq_len: usize,
    /// How to print.
    #[arg(long, value_enum, default_value_t = Format::Text)]
    format: Format,
}

pub(super) fn run(args: &InfoArgs) -> Result<()> {
    anyhow::ensure!(args.seq_len >= 1, "--seq-len 0: must be at least 1");
    let config = config_file::load_model(&args.config, &args.set)?;
    let cost = model_cost(&config, args.seq_len);
    let caches = cache_cost(&config);
    let per_token = |flops: u128| flops as f64 / args.seq_len as f64;
    if args.format == Format::Json {
        let stages: Vec<_> = cost
            .stages
            .iter()
            .map(|stage| {
                serde_json::json!({
                    "stage": stage.stage,
                    "parameters": stage.parameters,
                    "forward_flops_per_token": per_token(stage.sequence_flops),
                    "layer_positions_per_token": stage.layer_positions as f64 / args.seq_len as f64,
                })
            })
            .collect();
        let caches: Vec<_> = caches
            .iter()
            .map(|cache| {
                serde_json::json!({
                    "stage": cache.stage,
                    "growth_bytes_per_token_f32": cache.growth_bytes_per_token(CacheDtype::F32),
                    "growth_bytes_per_token_f16": cache.growth_bytes_per_token(CacheDtype::F16),
                    "max_entries": cache.max_entries,
                })
            })
            .collect();
        return print(serde_json::json!({
            "seq_len": args.seq_len,
            "parameters": cost.parameters(),
            "start_parameters": cost.start_parameters,
            "forward_flops_per_token": cost.forward_flops_per_token(),
            "training_flops_per_token": cost.training_flops_per_token(),
            "layer_positions_per_token": cost.layer_positions_per_token(),
            "stages": stages,
            "caches": caches,
        }));
    }

    let mut stages = table(&["stage", "parameters", "forward FLOPs/token", "layer-positions/token"]);
    for stage in &cost.stages {
        stages.add_row(vec![
            stage.stage.clone(),
            grouped(stage.parameters),
            grouped(per_token(stage.sequence_flops).round() as usize),
            format!("{:.3}", stage.layer_positions as f64 / args.seq_len as f64),
        ]);
    }
    stages.add_row(vec![
        "total".to_owned(),
        grouped(cost.parameters()),
        grouped(cost.forward_flops_per_token().round() as usize),
        format!("{:.3}", cost.layer_positions_per_token()),
    ]);
    stages.add_row(vec!["start vector".to_owned(), grouped(cost.start_parameters), String::new(), String::new()]);
    print(format!("sequences of {} tokens\n\n{stages}", args.seq_len))?;
    let training = grouped(cost.training_flops_per_token().round() as usize);
    print(format!("\ntraining FLOPs/token: {training}\n"))?;

    let mut cache_table = table(&["cache", "bytes/token f32", "bytes/token f16", "at most"]);
    let mut growth = [0.0; 2];
    for cache in &caches {
        let bytes = [CacheDtype::F32, CacheDtype::F16].map(|dtype| cache.growth_bytes_per_token(dtype));
        growth = [growth[0] + bytes[0], growth[1] + bytes[1]];
        let bound = cache.max_entries.map_or("grows".to_owned(), |n| {
            format!("{n} entries, {} bytes f32", grouped(n * cache.numbers_per_entry * CacheDtype::F32.bytes()))
        });
        cache_table.add_row(vec![cache.stage.clone(), format!("{:.1}", bytes[0]), format!("{:.1}", bytes[1]), bound]);
    }
    cache_table.add_row(vec![
        "growth".to_owned(),
        format!("{:.1}", growth[0]),
        format!("{:.1}", growth[1]),
        String::new(),
    ]);
    print(cache_table)
}
