"""Runs the tasks beside this file through lm-eval and compares its numbers with those of `photon-train eval` and
`photon-infer generate`.

Run by `check` in this folder.
"""

import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path

import lm_eval
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tokenizers import Tokenizer

from photon_lm import PhotonLM

programs = Path(sys.argv[1])
TASKS = ["photon_choice", "photon_word", "photon_text", "photon_continue"]
# Of the run that `check` makes.
MAX_LENGTH = 96


def close(found, expected, what):
    # The same forward, but rows of other lengths are cut into other products; f32.
    assert math.isclose(found, expected, rel_tol=1e-5, abs_tol=1e-4), (what, found, expected)


def requests(kind, *arguments):
    return [Instance(request_type=kind, doc={}, arguments=each, idx=index) for index, each in enumerate(arguments)]


def program(name, *words):
    command = [programs / name, *map(str, words)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def evaluate(checkpoint, text, n_tokens):
    """What `photon-train eval` says of a text, in one row that has no room for the end of the document."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt", newline="") as file:
        file.write(text)
        file.flush()
        words = ["eval", checkpoint, file.name, "--seq-len", n_tokens, "--format", "json"]
        told = json.loads(program("photon-train", *words))
    assert told["n_tokens"] == n_tokens, (told, text)
    return told


class Run:
    """A run that `check` has made, and its tokens."""

    def __init__(self, folder):
        self.name = folder.name
        self.checkpoint = folder / "checkpoints/best"
        file = self.checkpoint / "tokenizer.json"
        self.tokenizer = None if self.name == "bytes" else Tokenizer.from_file(str(file))

    def encode(self, text):
        if self.tokenizer is None:
            return list(text.encode())
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, token_ids):
        return bytes(token_ids).decode() if self.tokenizer is None else self.tokenizer.decode(token_ids)

    def nats(self, token_ids, first):
        """Of the tokens of a row from `first` on, by `photon-train eval`."""
        return self.nats_of_first(token_ids, len(token_ids)) - self.nats_of_first(token_ids, first)

    def nats_of_first(self, token_ids, n):
        if n == 0:
            return 0.0
        # It looks at two tokens at least; they are the first two slots of a chunk.
        looked_at = token_ids[:max(n, 2)]
        text = self.decode(looked_at)
        assert self.encode(text) == looked_at, (text, looked_at)
        told = evaluate(self.checkpoint, text, len(looked_at))
        return told["slot_nats"][0] if n == 1 else told["nats_per_token"] * n


def samples(results, task):
    return sorted(results["samples"][task], key=lambda sample: sample["doc_id"])


class Encoder(TemplateLM):
    """What lm-eval itself makes of the border between context and continuation."""

    eot_token_id = None
    _loglikelihood_tokens = loglikelihood_rolling = generate_until = None

    def __init__(self, encode):
        self.encode = encode

    def tok_encode(self, string, add_special_tokens=None, **kwargs):
        return self.encode(string)


def check(run):
    encode = run.encode
    model = {"model": str(run.checkpoint), "program": str(programs / "photon-infer")}
    tasks = TaskManager(include_path="tests/lm_eval/tasks", include_defaults=False)
    results = lm_eval.simple_evaluate(model="photon", model_args=model, tasks=TASKS, task_manager=tasks,
                                      log_samples=True, bootstrap_iters=0)
    n_checked = 0

    nats, n_bytes, n_windows = 0.0, 0, 0
    for sample in samples(results, "photon_text"):
        text = sample["doc"]["text"]
        tokens = encode(text)
        # A token less than in lm-eval's own windows, because the start vector takes a place in every row; that stands
        # where those have a prefix or, later, the oldest token.
        windows = list(map(make_disjoint_window, get_rolling_token_windows(tokens, None, MAX_LENGTH, 2)))
        assert [token for _, scored in windows for token in scored] == tokens
        expected = sum(-run.nats(context[1:] + scored, len(context) - 1) for context, scored in windows)
        found = sample["resps"][0][0]
        close(found, expected, text)
        nats, n_bytes, n_windows = nats - found, n_bytes + len(text.encode()), n_windows + len(windows)
        n_checked += 1
    close(results["results"]["photon_text"]["bits_per_byte,none"], nats / math.log(2) / n_bytes, "bits per byte")
    assert n_windows > n_checked, "one text is longer than a row"

    encoder = Encoder(encode)
    for sample in samples(results, "photon_choice") + samples(results, "photon_word"):
        for request, [[found, _]] in zip(sample["arguments"], sample["resps"]):
            context, scored = encoder._encode_pair(*request)
            close(found, -run.nats(context + scored, len(context)), request)
            n_checked += 1

    # What greedy decoding writes is greedy, and something else is not.
    contexts = ["The whale", "And", "It is the sea that they who sail the sea fear when they sail on"]
    continued = samples(results, "photon_continue")
    assert [sample["arguments"][0][0] for sample in continued] == contexts
    words = [word for context in contexts for word in ("--prompt", context)]
    told = program("photon-infer", "generate", "--model", run.checkpoint, *words, "--temperature", 0, "--max-tokens", 12,
                   "--stop", "\n\n", "--stop", "the the the", "--format", "json")
    for sample, line in zip(continued, told.splitlines()):
        assert sample["resps"][0][0] == json.loads(line)["text"], (sample, line)
        n_checked += 1
    photon = PhotonLM(**model)
    texts = photon.generate_until(requests("generate_until", *((context, {"max_gen_toks": 12}) for context in contexts)))
    whole = [(context, text) for context, text in zip(contexts, texts)
             if encode(context + text)[:len(encode(context))] == encode(context) and "\ufffd" not in text]
    other = [(context, ("X" if text[0] != "X" else "Y") + text[1:]) for context, text in whole]
    assert whole, texts
    found = photon.loglikelihood(requests("loglikelihood", *whole, *other))
    for (_, is_greedy), (context, text) in zip(found[:len(whole)], whole):
        # Tokens of the text may be others than those that were generated.
        assert is_greedy or len(encode(context + text)) != len(encode(context)) + 12, (context, text)
    assert not any(is_greedy for _, is_greedy in found[len(whole):]), (other, found)

    sampled = [("The whale", {"max_gen_toks": 8, "do_sample": True, "temperature": 1.0})] * 2
    first, second = photon.generate_until(requests("generate_until", *sampled))
    assert first != second, "rows draw from streams of their own"
    for arguments, complaint in [({"max_gen_toks": MAX_LENGTH}, "less than the 96 tokens"),
                                 ({"num_beams": 4}, "num_beams")]:
        try:
            photon.generate_until(requests("generate_until", ("The", arguments)))
        except ValueError as error:
            assert complaint in str(error), error
        else:
            raise AssertionError(f"{arguments} is not refused")
    print(f"lm-eval has photon's own numbers for {n_checked} requests: {run.name}")


for folder in sys.argv[2:]:
    check(Run(Path(folder)))
