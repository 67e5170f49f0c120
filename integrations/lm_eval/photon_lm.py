"""Photon checkpoints as a model of lm-evaluation-harness (`pip install lm-eval`; PyTorch is not needed).

From the command line this file stands in for `lm_eval`:

    python integrations/lm_eval/photon_lm.py run --model photon \
        --model_args model=runs/quickstart/checkpoints/best --tasks TASK

From Python, import it and use `lm_eval.simple_evaluate(model="photon", model_args="model=FOLDER", ...)`.

`photon-infer lm-eval` does all the work: tokens, windows, scores and generation. Arguments (`--model_args KEY=VALUE,...`):
`model` (the checkpoint), `program` (photon-infer; by default that on the PATH, or in target/release), `max_length`,
`preset`, `seed`. `--batch_size` is the number of rows that generate side by side: lm-eval's default is 1, and `auto` is
photon's, which is faster. `--device` takes photon's names; `cuda:0`, lm-eval's default, is photon's `auto`.
"""

import json
import shutil
import subprocess
from pathlib import Path

from lm_eval.api.model import LM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from tqdm import tqdm

# Written before any answer is read: less than the program reads ahead, so that neither waits for the other.
GROUP_LINES = 512


@register_model("photon")
class PhotonLM(LM):
    def __init__(self, model, program=None, max_length=None, preset=None, seed=None, batch_size=None, device=None,
                 max_batch_size=None):
        super().__init__()
        self.model = str(model)
        options = {"--model": model, "--max-length": max_length, "--preset": preset, "--seed": seed,
                   "--batch": None if batch_size == "auto" else batch_size,
                   "--device": "auto" if device == "cuda:0" else device}
        words = [word for name, value in options.items() if value is not None for word in (name, str(value))]
        self.process = subprocess.Popen([program or find_program(), "lm-eval", *words], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, text=True, encoding="utf-8")

    def loglikelihood(self, requests, disable_tqdm=False):
        def line(context, continuation):
            return {"context": context, "continuation": continuation}

        return self.ask("loglikelihood", requests, line, lambda it: (it["logprob"], it["is_greedy"]), disable_tqdm)

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        return self.ask("loglikelihood_rolling", requests, lambda text: {"text": text}, lambda it: it["logprob"],
                        disable_tqdm)

    def generate_until(self, requests, disable_tqdm=False):
        def line(context, settings):
            return {"context": context, **generation(settings)}

        return self.ask("generate_until", requests, line, lambda it: it["text"], disable_tqdm)

    def ask(self, kind, requests, line, result, disable_tqdm):
        """The results for requests of one kind, in their order."""
        results = []
        with tqdm(total=len(requests), desc=f"photon {kind}", disable=disable_tqdm) as progress:
            for start in range(0, len(requests), GROUP_LINES):
                group = requests[start:start + GROUP_LINES]
                lines = [json.dumps({"request": kind, **line(*request.args)}) + "\n" for request in group]
                for request, answer in zip(group, self.answers("".join(lines) + "\n", len(group))):
                    answer = json.loads(answer)
                    if "error" in answer:
                        raise ValueError(f"photon cannot answer {kind} {request.args!r}: {answer['error']}")
                    results.append(result(answer))
                    self.cache_hook.add_partial(kind, request.args, results[-1])
                    progress.update()
        return results

    def answers(self, lines, n):
        try:
            self.process.stdin.write(lines)
            self.process.stdin.flush()
        except BrokenPipeError:
            pass
        for _ in range(n):
            answer = self.process.stdout.readline()
            if not answer:
                raise RuntimeError(f"photon-infer lm-eval ended with status {self.process.wait()}; stderr says why")
            yield answer

    @property
    def tokenizer_name(self):
        return self.model.replace("/", "__")


def generation(settings):
    """What a task asks for, as photon names it; what photon cannot do is an error, because it would change results."""
    settings = normalize_gen_kwargs(dict(settings))
    sampled = settings.pop("do_sample")
    taken = {"until": settings.pop("until"), "max_gen_toks": settings.pop("max_gen_toks")}
    options = {name: settings.pop(name, None) for name in ("temperature", "top_k", "top_p")}
    if settings:
        raise ValueError(f"photon knows no generation settings {sorted(settings)}; it knows until, max_gen_toks, "
                         "do_sample, temperature, top_k, top_p")
    if sampled:
        # As transformers does where a task leaves the temperature open.
        options["temperature"] = options["temperature"] or 1.0
        taken.update({name: value for name, value in options.items() if value is not None})
    return taken


def find_program():
    built = Path(__file__).resolve().parents[2] / "target/release/photon-infer"
    program = shutil.which("photon-infer") or (str(built) if built.exists() else None)
    if program is None:
        raise FileNotFoundError("no photon-infer on the PATH or in target/release: build it, or say program=PATH")
    return program


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
