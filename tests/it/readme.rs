//! The commands that the README shows are run as they stand there, made small.

use std::path::Path;

use photon_core::accounting::model_cost;
use photon_core::config_file;

use crate::programs::{
    CHEAP, photon_train, program, repository, set, shell_words, shipped_text, some_text, stdout_of, tiny_checkpoint,
};

/// How the README calls a program.
const PREFIX: &str = "cargo run --release --bin photon-";

/// A model of more parameters is only read, and a small one run in its place.
const MAX_PARAMETERS: usize = 20_000_000;

/// The lines of all blocks fenced as `sh`, those that end in a backslash joined to the next.
fn commands(markdown: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut in_block = false;
    let mut line_so_far = String::new();
    for line in markdown.lines() {
        match line.trim() {
            "```sh" => in_block = true,
            "```" => in_block = false,
            line if in_block => match line.strip_suffix('\\') {
                Some(start) => line_so_far += start,
                None => found.push(std::mem::take(&mut line_so_far) + line),
            },
            _ => {}
        }
    }
    found.retain(|line| line.starts_with(PREFIX));
    found
}

/// The arguments of a command on their way from the README to a run that takes a second.
struct Args(Vec<String>);

impl Args {
    fn remove_option(&mut self, name: &str) -> Option<String> {
        let at = self.0.iter().position(|word| word == name || word.starts_with(&format!("{name}=")))?;
        match self.0.remove(at).split_once('=') {
            Some((_, value)) => Some(value.to_owned()),
            None => Some(self.0.remove(at)),
        }
    }

    fn set_option(&mut self, name: &str, value: &str) {
        self.remove_option(name);
        self.0.extend([name.to_owned(), value.to_owned()]);
    }

    /// Sets an option that stands there already.
    fn replace_option(&mut self, name: &str, value: &str) {
        if self.remove_option(name).is_some() {
            self.0.extend([name.to_owned(), value.to_owned()]);
        }
    }

    /// Puts `value` in the place of the first argument after the command.
    fn replace_first(&mut self, value: &Path) {
        self.0[1] = value.display().to_string();
    }

    fn shrink_model(&mut self, at: usize) {
        let path = repository().join(&self.0[at]);
        let config = config_file::load_model(&path, &[]).unwrap_or_else(|error| panic!("{error}"));
        if model_cost(&config, 1).parameters() > MAX_PARAMETERS {
            self.0[at] = "configs/model/photon-3l-tiny.toml".to_owned();
            while self.remove_option("--set").is_some() {}
        }
    }
}

/// One update of one row of each arm, of text that is here.
fn shrink_experiment(args: &mut Args, folder: &Path) {
    args.set_option("--out", &folder.join("out").display().to_string());
    let data = format!("run.data={{ paths = [{:?}], held_out = {{ tail = {{ fraction = 0.05 }} }} }}", shipped_text());
    let small = ["match=[]", "seeds=[1]", "budget={ steps = 1 }", "measures={}", "run.seq_len=128", "run.batch_size=1"];
    let cheap = ["run.micro_batch_size=1", "run.eval.max_tokens=128", "run.eval.sample_tokens=0", &data];
    args.0.extend(set(small.into_iter().chain(cheap)));
}

/// Makes a command small and points it at what there is; everything else stays as the README has it.
fn made_small(name: &str, words: Vec<String>, folder: &Path) -> Vec<String> {
    let mut args = Args(words);
    let path = |name: &str| folder.join(name).display().to_string();
    let text = folder.join("text.txt");
    std::fs::write(&text, some_text(8000)).unwrap();
    args.replace_option("--device", "cpu");
    let command = args.0[0].clone();
    match (name, command.as_str()) {
        ("train", "run") => {
            args.set_option("--out", &path("run"));
            args.0.extend(set(CHEAP));
            // Text and tokenizer of the reader's own are not here.
            let data = format!("data.paths=[{:?}]", shipped_text());
            args.0.extend(set([&data, "data.held_out={ tail = { fraction = 0.05 } }", "tokenizer=bytes"]));
            args.0.extend(set(["model.vocab_size=257"]));
        }
        ("train", "eval") => {
            args.replace_first(tiny_checkpoint());
            args.0[2] = text.display().to_string();
            args.set_option("--max-tokens", "256");
        }
        ("train", "probe") => {
            args.replace_first(tiny_checkpoint());
            args.replace_option("--text", &text.display().to_string());
            args.set_option("--windows", "4");
        }
        ("train", "bench") => {
            args.shrink_model(1);
            for (option, value) in
                [("--steps", "1"), ("--warmup-steps", "0"), ("--batch-size", "2"), ("--seq-len", "64")]
            {
                args.set_option(option, value);
            }
        }
        ("train", "ablate") => shrink_experiment(&mut args, folder),
        ("train", "report") => {
            let mut experiment = Args(["ablate", "experiments/levels/experiment.toml"].map(str::to_owned).to_vec());
            shrink_experiment(&mut experiment, folder);
            stdout_of(photon_train(experiment.0));
            args.0.retain(|word| !word.starts_with("runs/"));
            args.0.insert(1, path("out"));
        }
        ("train", "info") => {}
        ("train", "plot") => {
            let run = tiny_checkpoint().ancestors().nth(2).expect("checkpoints lie in a run");
            args.0.retain(|word| !word.starts_with("runs/"));
            args.0.insert(1, run.display().to_string());
            args.set_option("--out", &path("curves.html"));
        }
        ("train", "prepare") => args.set_option("--tokens", &path("tokens")),
        ("train", "tokenizer") => {
            args.replace_first(&text);
            args.set_option("--out", &path("tokenizer.json"));
        }
        ("train", "import-llama") => {
            args.replace_first(&Path::new(env!("CARGO_MANIFEST_DIR")).join("golden/llama/model"));
            args.set_option("--out", &path("imported"));
        }
        ("infer", "generate") => {
            args.replace_option("--model", &tiny_checkpoint().display().to_string());
            args.set_option("--max-tokens", "8");
        }
        ("infer", "presets" | "devices") => {}
        ("infer", "fidelity") => {
            args.replace_option("--model", &tiny_checkpoint().display().to_string());
            args.replace_option("--text", &text.display().to_string());
            for (option, value) in [("--context", "64"), ("--prompt", "16"), ("--max-tokens", "128")] {
                args.set_option(option, value);
            }
        }
        ("infer", "parity") => {
            args.replace_option("--model", &tiny_checkpoint().display().to_string());
            args.replace_option("--text", &text.display().to_string());
            args.set_option("--devices", "cpu,cpu");
            for (option, value) in [("--context", "32"), ("--prompt", "16"), ("--greedy-tokens", "4")] {
                args.set_option(option, value);
            }
        }
        ("infer", "bench") => {
            args.replace_option("--model", &tiny_checkpoint().display().to_string());
            args.replace_option("--memory-gib", "0.004");
            let configs = (0..args.0.len()).filter(|&at| args.0[at] == "--config");
            for config in configs.collect::<Vec<_>>() {
                args.shrink_model(config + 1);
            }
            for (option, value) in [("--prompt-tokens", "16"), ("--decode-tokens", "4"), ("--repeats", "1")] {
                args.set_option(option, value);
            }
        }
        (_, "--help" | "--version") => {}
        _ => panic!("the README shows photon-{name} {command}, which this test does not know how to make small"),
    }
    args.0
}

#[test]
fn every_command_of_the_readme_runs() {
    let readme = std::fs::read_to_string(repository().join("README.md")).expect("there is a README.md");
    let commands = commands(&readme);
    let mut seen = Vec::new();
    for line in &commands {
        let (name, rest) = line[PREFIX.len()..].split_once(" -- ").unwrap_or_else(|| panic!("no ` -- ` in: {line}"));
        let folder = tempfile::tempdir().unwrap();
        let words = made_small(name, shell_words(rest), folder.path());
        seen.push(format!("{name} {}", words[0]));
        println!("{line}\n  as: {words:?}");
        let mut command = program(&format!("photon-{name}"));
        command.args(words);
        stdout_of(command);
    }
    for needed in ["train run", "infer generate"] {
        assert!(
            seen.iter().any(|command| command == needed),
            "no `sh` block of the README has {needed}: {commands:#?}"
        );
    }
}

#[test]
fn commands_are_found_in_blocks_only() {
    let markdown = "cargo run --release --bin photon-train -- run outside\n```sh\n# first\n\
                    cargo run --release --bin photon-train -- run \\\n  a.toml\nls\n```\n\
                    ```text\ncargo run --release --bin photon-train -- run b.toml\n```\n";
    assert_eq!(commands(markdown), ["cargo run --release --bin photon-train -- run a.toml"]);
}
