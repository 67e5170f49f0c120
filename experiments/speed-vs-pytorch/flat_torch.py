"""Speed of the flat model in PyTorch on the CPU: training, decoding, and the matmul rate beside them.

Reads a photon model config with `architecture = "flat"`, builds the same decoder-only transformer
(pre-norm RMSNorm, rotate-half RoPE, SwiGLU, no biases, untied head, learned start embedding) and
prints a table to stderr and one JSON object to stdout. Weights and tokens are random, dtype is f32.

    python flat_torch.py CONFIG.toml --threads 2 --batch-size 8 --seq-len 256

Needs Python 3.11 and torch 2.5 or later. Shape legend: B batch, T positions, D width, H heads,
G key-value heads, K head dimension, F hidden width of the feed-forward, V vocabulary.
"""

import argparse
import json
import statistics
import sys
import time
import tomllib
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MATMUL_SIZE = 2048
MATMUL_RUNS = 9
DECODE_RUNS = 3
INIT_STD = 0.02
LEARNING_RATE = 3e-4
MAX_GRAD_NORM = 1.0
SEED = 0


@dataclass(frozen=True)
class FlatConfig:
    vocab_size: int
    d_model: int
    norm_eps: float
    n_layers: int
    n_heads: int
    n_kv_heads: int
    d_ff: int
    rope_theta: float

    @classmethod
    def read(cls, path: str) -> "FlatConfig":
        """Reads a photon model config; a key this script does not know is an error."""
        with open(path, "rb") as file:
            model = tomllib.load(file)
        stack = model.pop("stack")
        if (architecture := model.pop("architecture")) != "flat":
            raise ValueError(f'architecture = "{architecture}": only "flat" is built here')
        if (attention := stack.pop("attention")) != "full":
            raise ValueError(f'stack.attention = "{attention}": only "full" is built here')
        rope_theta = stack.pop("positions")["rope"]["theta"]
        return cls(**model, **stack, rope_theta=rope_theta)

    @property
    def head_dim(self) -> int:
        return self.d_model // self.n_heads


class LayerCache(NamedTuple):
    """Preallocated keys and values of one layer, each [B, G, capacity, K]."""

    keys: Tensor
    values: Tensor

    def write(self, start: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Stores the units from position `start` on and returns everything up to them."""
        end = start + keys.shape[2]
        self.keys[:, :, start:end] = keys
        self.values[:, :, start:end] = values
        return self.keys[:, :, :end], self.values[:, :, :end]


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions in the rotate-half layout."""
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Attention(nn.Module):
    def __init__(self, config: FlatConfig):
        super().__init__()
        self.config = config
        all_heads = config.n_heads + 2 * config.n_kv_heads
        self.qkv = nn.Linear(config.d_model, all_heads * config.head_dim, bias=False)
        self.out = nn.Linear(config.d_model, config.d_model, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, start: int, cache: LayerCache | None) -> Tensor:
        n_heads, n_kv_heads = self.config.n_heads, self.config.n_kv_heads
        batch, positions, d_model = x.shape
        qkv = self.qkv(x).view(batch, positions, -1, self.config.head_dim)  # [B, T, H + 2G, K]
        qkv = qkv.transpose(1, 2)  # [B, H + 2G, T, K]
        to_rotate, values = qkv.split((n_heads + n_kv_heads, n_kv_heads), dim=1)
        queries, keys = rotate(to_rotate, cos, sin).split((n_heads, n_kv_heads), dim=1)
        if cache is not None:
            keys, values = cache.write(start, keys, values)
        attended = F.scaled_dot_product_attention(
            queries,
            keys,
            values,
            is_causal=positions > 1,  # a single query sees the whole cache
            enable_gqa=n_heads != n_kv_heads,
        )  # [B, H, T, K]
        return self.out(attended.transpose(1, 2).reshape(batch, positions, d_model))


class FeedForward(nn.Module):
    def __init__(self, config: FlatConfig):
        super().__init__()
        self.gate_up = nn.Linear(config.d_model, 2 * config.d_ff, bias=False)
        self.down = nn.Linear(config.d_ff, config.d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)  # [B, T, F] each
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, config: FlatConfig):
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, start: int, cache: LayerCache | None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin, start, cache)
        return x + self.feed_forward(self.feed_forward_norm(x))


class FlatModel(nn.Module):
    def __init__(self, config: FlatConfig, max_positions: int):
        super().__init__()
        self.config = config
        self.start = nn.Parameter(torch.empty(1, 1, config.d_model))
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.norm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=INIT_STD)

        frequencies = config.rope_theta ** (-torch.arange(0, config.head_dim, 2) / config.head_dim)
        angles = torch.outer(torch.arange(max_positions), frequencies)  # [T, K / 2]
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def with_start(self, embeddings: Tensor) -> Tensor:
        return torch.cat((self.start.expand(embeddings.shape[0], -1, -1), embeddings), dim=1)

    def run_blocks(self, x: Tensor, start: int, caches: list[LayerCache | None]) -> Tensor:
        end = start + x.shape[1]
        cos, sin = self.cos[start:end], self.sin[start:end]
        for block, cache in zip(self.blocks, caches, strict=True):
            x = block(x, cos, sin, start, cache)
        return x  # [B, T, D]

    def loss(self, token_ids: Tensor) -> Tensor:
        """Mean cross-entropy; the logits at i predict token i, from the start embedding and tokens < i."""
        x = self.with_start(self.embedding(token_ids[:, :-1]))  # [B, T, D]
        x = self.run_blocks(x, 0, [None] * self.config.n_layers)
        logits = self.head(self.norm(x))  # [B, T, V]
        return F.cross_entropy(logits.flatten(0, 1), token_ids.flatten())

    def new_caches(self, batch: int, capacity: int) -> list[LayerCache]:
        shape = (batch, self.config.n_kv_heads, capacity, self.config.head_dim)
        return [LayerCache(torch.zeros(shape), torch.zeros(shape)) for _ in self.blocks]

    def next_token(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x[:, -1:])).argmax(dim=-1)  # [B, 1]

    def prefill(self, prompt_ids: Tensor, caches: list[LayerCache]) -> Tensor:
        """The greedy token after the prompt."""
        return self.next_token(self.run_blocks(self.with_start(self.embedding(prompt_ids)), 0, caches))

    def step(self, token_id: Tensor, position: int, caches: list[LayerCache]) -> Tensor:
        """The greedy token after `token_id`, which stands at `position`."""
        return self.next_token(self.run_blocks(self.embedding(token_id), position, caches))


def forward_flops_per_token(model: FlatModel, seq_len: int) -> float:
    """Two per matmul weight, and causal attention over (T + 1) / 2 keys on average."""
    config = model.config
    matmul_parameters = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))
    return 2 * matmul_parameters + 4 * config.n_layers * config.d_model * (seq_len + 1) / 2


def matmul_flops_per_sec() -> float:
    left, right = torch.randn(2, MATMUL_SIZE, MATMUL_SIZE)
    product = left @ right
    times_secs = []
    for _ in range(MATMUL_RUNS):
        began = time.perf_counter()
        torch.matmul(left, right, out=product)
        times_secs.append(time.perf_counter() - began)
    return 2 * MATMUL_SIZE**3 / statistics.median(times_secs)


def training_step_secs(model: FlatModel, args: argparse.Namespace) -> float:
    """Median time of forward, backward, clipping and AdamW."""
    loss_of = torch.compile(model.loss) if args.compile else model.loss
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    times_secs = []
    for _ in range(args.warmup + args.steps):
        token_ids = torch.randint(model.config.vocab_size, (args.batch_size, args.seq_len))
        began = time.perf_counter()
        loss_of(token_ids).backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()
        times_secs.append(time.perf_counter() - began)
    return statistics.median(times_secs[args.warmup :])


@torch.inference_mode()
def decode_token_secs(model: FlatModel, args: argparse.Namespace) -> float:
    """Time per greedy token at batch 1 after the prompt; median over runs, the first one left out."""
    step = torch.compile(model.step, dynamic=True) if args.compile else model.step
    prompt_ids = torch.randint(model.config.vocab_size, (1, args.prompt_len))
    first_position = 1 + args.prompt_len
    caches = model.new_caches(1, first_position + args.decode_tokens)
    times_secs = []
    for _ in range(1 + DECODE_RUNS):
        token_id = model.prefill(prompt_ids, caches)
        began = time.perf_counter()
        for position in range(first_position, first_position + args.decode_tokens):
            token_id = step(token_id, position, caches)
        times_secs.append((time.perf_counter() - began) / args.decode_tokens)
    return statistics.median(times_secs[1:])


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", help="photon model config (TOML)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--steps", type=int, default=20, help="measured training steps")
    parser.add_argument("--warmup", type=int, default=3, help="training steps before measuring")
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--decode-tokens", type=int, default=256)
    parser.add_argument("--compile", action="store_true", help="use torch.compile (needs a C++ compiler)")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(SEED)
    config = FlatConfig.read(args.config)
    max_positions = max(args.seq_len, 1 + args.prompt_len + args.decode_tokens)
    model = FlatModel(config, max_positions)

    matmul_rate = matmul_flops_per_sec()
    training_rate = args.batch_size * args.seq_len / training_step_secs(model, args)
    decode_rate = 1 / decode_token_secs(model, args)
    training_flops = 3 * forward_flops_per_token(model, args.seq_len)

    report = {
        "training_tokens_per_sec": training_rate,
        "decode_tokens_per_sec": decode_rate,
        "matmul_gflops": matmul_rate / 1e9,
        "training_flops_per_token": training_flops,
        "training_mfu": training_rate * training_flops / matmul_rate,
        "parameters": sum(p.numel() for p in model.parameters()),
        "torch_version": torch.__version__,
        "compile": args.compile,
        "threads": args.threads,
        "batch_size": args.batch_size,
        "seq_len": args.seq_len,
        "steps": args.steps,
        "warmup": args.warmup,
        "prompt_len": args.prompt_len,
        "decode_tokens": args.decode_tokens,
        "config": asdict(config),
    }
    for name, value in report.items():
        if name != "config":
            shown = f"{value:,.4g}" if isinstance(value, float) else str(value)
            print(f"{name:<26}{shown:>18}", file=sys.stderr)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
