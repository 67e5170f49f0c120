"""PHOTON in plain PyTorch: the same equations and the same names as photon's, to compare numbers and speed.

    python photon_torch.py CONFIG.toml --threads 2 --batch-size 8 --seq-len 256    # training speed, as JSON
    python photon_torch.py CHECKPOINT --logits 7,1,42                              # logits of a sequence, as JSON

Needs Python 3.11 with torch 2.5 or later, and safetensors for checkpoints. Only the hierarchical architecture, with
full and windowed encoders and any decoder but `lookback`; the flat one is `../speed-vs-pytorch/flat_torch.py`.

Shape legend: B batch, T tokens, M units, N positions of a stack, G groups, C chunk length, R prefix length, D width,
H heads, K head dimension, W window.
"""

import argparse
import json
import statistics
import sys
import time
import tomllib
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

INIT_STD = 0.02
LEARNING_RATE = 1e-3
MAX_GRAD_NORM = 1.0
SEED = 0
# From so many windows on, a window is computed in blocks; below, a mask is faster.
MIN_WINDOWS = 4


class Linear(nn.Module):
    """A matrix as photon stores it: [D_in, D_out]."""

    def __init__(self, d_input: int, d_output: int, bias: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(d_input, d_output) * INIT_STD)
        self.bias = nn.Parameter(torch.zeros(d_output)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.T, self.bias)


class Norm(nn.Module):
    def __init__(self, d_model: int, eps: float):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(d_model))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.gamma.shape, self.gamma, self.eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def windowed(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Attention of each position to the newest `window`, itself included: [B, H, N, K]."""
    n = q.shape[2]
    if n < MIN_WINDOWS * window:
        offsets = torch.arange(n)[:, None] - torch.arange(n)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=(offsets >= 0) & (offsets < window))
    n_blocks = -(-n // window)
    after = n_blocks * window - n
    q = F.pad(q, (0, 0, 0, after)).unflatten(2, (n_blocks, window)).transpose(1, 2).flatten(0, 1)  # [B*n, H, W, K]

    def met(x: Tensor) -> Tensor:
        x = F.pad(x, (0, 0, window, after)).unflatten(2, (n_blocks + 1, window))
        return torch.cat((x[:, :, :-1], x[:, :, 1:]), dim=3).transpose(1, 2).flatten(0, 1)  # [B*n, H, 2W, K]

    offsets = torch.arange(window)[:, None] + window - torch.arange(2 * window)
    mask = ((offsets >= 0) & (offsets < window)).expand(n_blocks, 1, -1, -1).clone()
    mask[0, :, :, :window] = False  # before the first block there is nothing
    mask = mask.repeat(q.shape[0] // n_blocks, 1, 1, 1)
    out = F.scaled_dot_product_attention(q, met(k), met(v), attn_mask=mask)
    return out.unflatten(0, (-1, n_blocks)).transpose(1, 2).flatten(2, 3)[:, :, :n]


class Attention(nn.Module):
    def __init__(self, d_model: int, spec: dict):
        super().__init__()
        self.n_heads, self.n_kv_heads = spec["n_heads"], spec.get("n_kv_heads", spec["n_heads"])
        d_kv = self.n_kv_heads * d_model // self.n_heads
        self.q_proj, self.o_proj = Linear(d_model, d_model), Linear(d_model, d_model)
        self.k_proj, self.v_proj = Linear(d_model, d_kv), Linear(d_model, d_kv)
        self.window = spec["window"]

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor] | None) -> Tensor:
        def heads(x: Tensor, n: int) -> Tensor:
            return x.unflatten(-1, (n, -1)).transpose(1, 2)  # [B, H, N, K]

        q, k, v = heads(self.q_proj(x), self.n_heads), heads(self.k_proj(x), self.n_kv_heads), self.v_proj(x)
        v = heads(v, self.n_kv_heads)
        if rotation is not None:
            q, k = rotate(q, *rotation), rotate(k, *rotation)
        k, v = (x.repeat_interleave(self.n_heads // self.n_kv_heads, dim=1) for x in (k, v))
        if self.window is None or self.window >= x.shape[1]:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            out = windowed(q, k, v, self.window)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, d_model: int, d_ff: int):
        super().__init__()
        self.gate_proj, self.up_proj = Linear(d_model, d_ff), Linear(d_model, d_ff)
        self.down_proj = Linear(d_ff, d_model)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, d_model: int, spec: dict, eps: float):
        super().__init__()
        self.attention_norm, self.attention = Norm(d_model, eps), Attention(d_model, spec)
        self.feed_forward_norm, self.feed_forward = Norm(d_model, eps), FeedForward(d_model, spec["d_ff"])

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor] | None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotation)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Stack(nn.Module):
    def __init__(self, d_model: int, spec: dict, eps: float):
        super().__init__()
        if spec.get("sink"):
            raise ValueError("sink = true is not built here")
        self.blocks = nn.ModuleList(Block(d_model, spec, eps) for _ in range(spec["n_layers"]))
        self.norm = Norm(d_model, eps)
        self.head_dim = d_model // spec["n_heads"]
        positions = spec.get("positions", {"rope": {"theta": 10000.0}})
        self.theta = None if positions == "none" else positions["rope"]["theta"]
        self.tables: dict[int, tuple[Tensor, Tensor]] = {}

    def rotation(self, n_positions: int) -> tuple[Tensor, Tensor] | None:
        if self.theta is None:
            return None
        if n_positions not in self.tables:
            powers = torch.arange(0, self.head_dim, 2, dtype=torch.float64) / self.head_dim
            angles = torch.outer(torch.arange(n_positions, dtype=torch.float64), self.theta**-powers)
            self.tables[n_positions] = (angles.cos().float(), angles.sin().float())
        return self.tables[n_positions]

    def forward(self, x: Tensor) -> Tensor:
        rotation = self.rotation(x.shape[1])
        for block in self.blocks:
            x = block(x, rotation)
        return self.norm(x)


class Projection(nn.Module):
    def __init__(self, d_input: int, d_output: int, eps: float):
        super().__init__()
        self.norm, self.proj = Norm(d_input, eps), Linear(d_input, d_output, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(self.norm(x))


class Chunker(nn.Module):
    def __init__(self, chunk_len: int, d_unit: int, d_model: int, projects: bool, eps: float):
        super().__init__()
        self.chunk_len = chunk_len
        self.projection = Projection(chunk_len * d_unit, d_model, eps) if projects else None

    def forward(self, units: Tensor) -> Tensor:
        chunks = units.unflatten(1, (-1, self.chunk_len)).flatten(2)  # [B, M, C*D]
        return chunks if self.projection is None else self.projection(chunks)


class Encoder(nn.Module):
    def __init__(self, level: dict, d_unit: int, projects: bool, eps: float):
        super().__init__()
        self.chunker = Chunker(level["chunk_len"], d_unit, level["d_model"], projects, eps)
        spec = dict(level["encoder"])
        attention = spec.pop("attention", "full")
        window = None if attention == "full" else attention["window"]["units"]
        self.stack = Stack(level["d_model"], {**spec, "window": window}, eps)

    def forward(self, units: Tensor) -> Tensor:
        return self.stack(self.chunker(units))


class Converter(nn.Module):
    def __init__(self, d_model: int, d_below: int, prefix_len: int):
        super().__init__()
        self.proj, self.prefix_len = Linear(d_model, prefix_len * d_below, bias=True), prefix_len

    def forward(self, conditioning: Tensor) -> Tensor:
        return self.proj(conditioning).unflatten(-1, (self.prefix_len, -1))  # [B, G, R, D]


class Decoder(nn.Module):
    def __init__(self, level: dict, d_below: int, eps: float):
        super().__init__()
        self.chunk_len, self.prefix_len = level["chunk_len"], level["converter"]["prefix_len"]
        self.converter = Converter(level["d_model"], d_below, self.prefix_len)
        spec = dict(level["decoder"])
        attention = spec.pop("attention", "chunk")
        self.is_local = attention == "chunk"
        window = None if self.is_local else attention["stream"]["window"]
        self.stack = Stack(d_below, {**spec, "window": window}, eps)

    def forward(self, conditioning: Tensor, units: Tensor) -> Tensor:
        batch = units.shape[0]
        groups = units.unflatten(1, (-1, self.chunk_len))  # [B, G, C, D]
        if self.is_local:
            groups = groups[:, :, : self.chunk_len - 1]
        groups = torch.cat((self.converter(conditioning), groups), dim=2)  # [B, G, S, D]
        group_len = groups.shape[2]
        stream = groups.flatten(0, 1) if self.is_local else groups.flatten(1, 2)
        out = self.stack(stream).reshape(batch, -1, group_len, units.shape[2])
        return out[:, :, self.prefix_len - 1 :][:, :, : self.chunk_len].flatten(1, 2)  # [B, M, D]


class Photon(nn.Module):
    def __init__(self, config: dict):
        super().__init__()
        if (architecture := config["architecture"]) != "photon":
            raise ValueError(f'architecture = "{architecture}": only "photon" is built here')
        levels, eps = config["levels"], config.get("norm_eps", 1e-5)
        d_embed = config.get("d_embed", levels[0]["d_model"] // levels[0]["chunk_len"])
        widths = [config["d_model"]] + [level["d_model"] for level in levels]
        d_units = [d_embed] + widths[1:]
        self.vocab_size = config["vocab_size"]
        self.encoder_embedding = nn.Embedding(self.vocab_size, d_embed)
        self.decoder_embedding = nn.Embedding(self.vocab_size, widths[0])
        self.encoders = nn.ModuleList(
            Encoder(level, d_units[i], i > 0 or "d_embed" in config, eps) for i, level in enumerate(levels)
        )
        self.decoders = nn.ModuleList(Decoder(level, widths[i], eps) for i, level in enumerate(levels))
        self.start_latent = nn.Parameter(torch.randn(widths[-1]) * INIT_STD)
        self.head = Linear(widths[0], self.vocab_size)
        self.meta_chunk = 1
        for level in levels:
            self.meta_chunk *= level["chunk_len"]
        for table in (self.encoder_embedding, self.decoder_embedding):
            nn.init.normal_(table.weight, std=INIT_STD)

    def forward(self, token_ids: Tensor) -> Tensor:
        """The logits at position i predict token i from the tokens before: [B, T, V]."""
        n_tokens = token_ids.shape[1]
        token_ids = F.pad(token_ids, (0, -n_tokens % self.meta_chunk))
        units, below = [self.decoder_embedding(token_ids)], self.encoder_embedding(token_ids)
        for encoder in self.encoders:
            below = encoder(below)
            units.append(below)
        start = self.start_latent.expand(below.shape[0], 1, -1)
        conditioning = torch.cat((start, below[:, :-1]), dim=1)  # the top alone is shifted
        for level in reversed(range(len(self.decoders))):
            conditioning = self.decoders[level](conditioning, units[level])
        return self.head(conditioning[:, :n_tokens])

    def loss(self, token_ids: Tensor) -> Tensor:
        return F.cross_entropy(self(token_ids).flatten(0, 1), token_ids.flatten())


def read_config(path: Path) -> dict:
    with open(path, "rb") as file:
        return tomllib.load(file)


def logits(checkpoint: Path, token_ids: list[int]) -> list[list[float]]:
    from safetensors.torch import load_file

    model = Photon(read_config(checkpoint / "config.toml"))
    model.load_state_dict(load_file(checkpoint / "model.safetensors"))
    with torch.inference_mode():
        return model(torch.tensor([token_ids]))[0].tolist()


def training_speed(args: argparse.Namespace) -> dict:
    torch.manual_seed(SEED)
    model = Photon(read_config(Path(args.model)))
    loss_of = torch.compile(model.loss) if args.compile else model.loss
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.1, fused=True)
    secs = []
    for _ in range(args.warmup + args.steps):
        token_ids = torch.randint(model.vocab_size, (args.batch_size, args.seq_len))
        began = time.perf_counter()
        loss_of(token_ids).backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()
        secs.append(time.perf_counter() - began)
    rate = args.batch_size * args.seq_len / statistics.median(secs[args.warmup :])
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return {"training_tokens_per_sec": rate, "parameters": parameters, "torch": torch.__version__}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="photon model config (TOML), or a checkpoint's folder for --logits")
    parser.add_argument("--logits", help="token ids, separated by commas")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--compile", action="store_true", help="use torch.compile (needs a C++ compiler)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.logits:
        result = logits(Path(args.model), [int(id) for id in args.logits.split(",")])
    else:
        result = training_speed(args)
    json.dump(result, sys.stdout)


if __name__ == "__main__":
    main()
