"""Makes the golden files of a tiny Llama, the reference our loader and forward pass must reproduce.

Beside this script it writes
    model/config.json, model/model.safetensors   a LlamaForCausalLM in the layout of save_pretrained
    model/tokenizer.json                         a byte-level BPE with 320 entries, no post-processor
    expected.safetensors                         input_ids int64 [1, 41] and logits f32 [41, 320]
The logits at i are the model's own: they predict token i + 1. The weights are shaken, so no parameter
keeps an initial zero or one.

Made with Python 3.11, torch 2.15.0, transformers 5.24.0, tokenizers 0.23.3, safetensors 0.8.0.
Bit-identical when rerun with the same versions on the same machine. Rerun:
    pip install torch transformers safetensors numpy
    python make.py
"""

from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).resolve().parent
MODEL_DIR = HERE / "model"

SEED = 20251220
VOCAB_SIZE = 320
SEQ_LEN = 41
SPECIAL_TOKENS = ["<unk>", "<s>", "</s>"]
BOS_ID = SPECIAL_TOKENS.index("<s>")
EOS_ID = SPECIAL_TOKENS.index("</s>")
MATRIX_STD = 0.2
NORM_SPREAD = 0.2

TOKENIZER_TEXT = [
    "The light of the morning came over the hills and the water of the river was still.",
    "A photon has no mass, and yet it carries energy and momentum from the star to the eye.",
    "When the children went down to the harbour, they counted the ships and wrote the names in a book.",
    "Whether a model reads letters, words or chunks of words, it learns from what comes before.",
    "In 1905 and 1921 the same questions were asked; the answers were not the same.",
]


def shaken_model() -> LlamaForCausalLM:
    torch.manual_seed(SEED)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=64,
            max_position_embeddings=128,
            rms_norm_eps=1e-5,
            rope_theta=10000.0,
            tie_word_embeddings=False,
            bos_token_id=BOS_ID,
            eos_token_id=EOS_ID,
            dtype=torch.float32,
            attn_implementation="eager",
        )
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.normal_(1.0, NORM_SPREAD)
            else:
                parameter.normal_(0.0, MATRIX_STD)
    return model.eval()


def byte_level_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TOKENIZER_TEXT, trainer)
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise ValueError(f"{tokenizer.get_vocab_size()} entries: add text until there are {VOCAB_SIZE}")
    return tokenizer


def main() -> None:
    model = shaken_model()
    first_id = torch.tensor([BOS_ID])
    input_ids = torch.cat((first_id, torch.randint(len(SPECIAL_TOKENS), VOCAB_SIZE, (SEQ_LEN - 1,))))[None]
    with torch.no_grad():
        logits = model(input_ids).logits[0]

    model.save_pretrained(MODEL_DIR, safe_serialization=True)
    (MODEL_DIR / "generation_config.json").unlink(missing_ok=True)
    byte_level_tokenizer().save(str(MODEL_DIR / "tokenizer.json"))
    save_file({"input_ids": input_ids, "logits": logits}, HERE / "expected.safetensors")
    print(f"logits: standard deviation {logits.std():.2f}, largest {logits.abs().max():.2f}")


if __name__ == "__main__":
    main()
