"""Models of texts, of transformers and x-transformers: their sequences are sharded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo import packages
from tests.zoo.entry import Entry
from tests.zoo.words import EMBEDDINGS, KEYS, PRODUCTS

_PLAIN = (KEYS, *EMBEDDINGS)


_EXPERTS = (
    *_PLAIN,
    (
        "grouped_mm_experts",
        "needed: a few experts' numbers of each rank, by which all divide the sorted order",
    ),
)


def words(n: int) -> list[Tensor]:
    """Two sequences of n words."""
    return [torch.randint(3, 50, (2, n))]


def _pairs(n: int) -> list[Tensor]:
    """Two sequences of n words for an encoder, and as many for a decoder."""
    return [*words(n), *words(n)]


def _logits(out: Any) -> Tensor:
    return out.logits


def hidden(out: Any) -> Tensor:
    """What a model without a head gives."""
    return out.last_hidden_state


def of_transformers(auto: str, kind: str, attention: str = "sdpa", **sizes: Any) -> Callable[[], nn.Module]:
    """A model of transformers.

    Args:
        auto: the class that makes models of configurations.
        kind: of the model.
        attention: how it attends.
        sizes: of its configuration.
    """

    def make() -> nn.Module:
        config = packages.of("transformers", "AutoConfig").for_model(kind, **sizes)
        if hasattr(config, "use_cache"):
            config.use_cache = False
        return packages.of("transformers", auto).from_config(config, attn_implementation=attention)

    return make


_DECODER = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_ENCODER = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "pad_token_id": 0,
}
_BOTH = {
    "vocab_size": 50,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "dropout": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
_T5 = {"vocab_size": 50, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4, "dropout_rate": 0.0}


LEFT_OUT = object()
"""In place of a setting that a configuration does not take."""


def _decoder(
    name: str,
    kind: str,
    gathers: tuple[tuple[str, str], ...] = _PLAIN,
    dtype: torch.dtype = torch.float64,
    graphs: int = 1,
    shard_parameters: str = "",
    **sizes: Any,
) -> Entry:
    settings = {name: value for name, value in {**_DECODER, **sizes}.items() if value is not LEFT_OUT}
    make = of_transformers("AutoModelForCausalLM", kind, **settings)
    limit = 1e-9 if dtype is torch.float64 else 1e-4
    return Entry(
        name, make, words, (1,), read=_logits, package="transformers", gathers=gathers, dtype=dtype, tolerance=limit,
        graphs=graphs, shard_parameters=shard_parameters,
    )  # fmt: skip


def _encoder(name: str, kind: str, gathers: tuple[tuple[str, str], ...] = _PLAIN, **sizes: Any) -> Entry:
    make = of_transformers("AutoModelForMaskedLM", kind, **{**_ENCODER, **sizes})
    return Entry(name, make, words, (1,), read=_logits, package="transformers", gathers=gathers)


def _x_transformer(causal: bool = True, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        layer = packages.of("x_transformers", "Decoder" if causal else "Encoder")
        layers = layer(dim=32, depth=1, heads=4, attn_dim_head=8, **options)
        return packages.of("x_transformers", "TransformerWrapper")(num_tokens=50, max_seq_len=64, attn_layers=layers)

    return make


def _x(name: str, graphs: int = 1, **options: Any) -> Entry:
    make, gathers = _x_transformer(**options), (PRODUCTS, *EMBEDDINGS)
    return Entry(name, make, words, (1,), package="x_transformers", gathers=gathers, graphs=graphs)


OF_TEXT = [
    _decoder("hf-llama", "llama"),
    _decoder("hf-mistral", "mistral", sliding_window=None),
    _decoder("hf-qwen2", "qwen2"),
    _decoder("hf-qwen3", "qwen3"),
    _decoder("hf-gemma2", "gemma2", dtype=torch.float32, attention="eager", query_pre_attn_scalar=8),
    _decoder("hf-gemma3", "gemma3_text", dtype=torch.float32, attention="eager", query_pre_attn_scalar=8, sliding_window=4),
    _decoder("hf-phi3", "phi3"),
    _decoder("hf-olmo2", "olmo2"),
    _decoder("hf-falcon", "falcon", head_dim=LEFT_OUT, hidden_dropout=0.0, attention_dropout=0.0),
    _decoder("hf-bloom", "bloom", attention="eager", n_layer=1, n_head=4, hidden_dropout=0.0, attention_dropout=0.0),
    _decoder("hf-opt", "opt", ffn_dim=64, dropout=0.0, max_position_embeddings=64, word_embed_proj_dim=32),
    _decoder("hf-gpt-neox", "gpt_neox"),
    _decoder("hf-gpt2", "gpt2", n_embd=32, n_layer=1, n_head=4, n_positions=64, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
    _decoder("hf-mixtral", "mixtral", _EXPERTS, dtype=torch.float32, num_local_experts=4, num_experts_per_tok=2),
    _decoder("hf-mixtral-sharded-experts", "mixtral", _EXPERTS, dtype=torch.float32, shard_parameters="experts.", num_local_experts=4, num_experts_per_tok=2),
    _decoder("hf-olmoe", "olmoe", _EXPERTS, dtype=torch.float32, num_experts=4, num_experts_per_tok=2),
    _decoder("hf-mamba", "mamba", attention="eager", state_size=4),
    # It pads to whole chunks where words are left over, which is another graph, as in plain PyTorch.
    _decoder("hf-mamba2", "mamba2", graphs=2, attention="eager", dtype=torch.float32, num_heads=4, head_dim=16, state_size=4, n_groups=1, chunk_size=4),
    _encoder("hf-bert", "bert"),
    _encoder("hf-roberta", "roberta"),
    _encoder("hf-electra", "electra", embedding_size=32),
    _encoder("hf-distilbert", "distilbert", dim=32, hidden_dim=64, n_layers=1, n_heads=4, dropout=0.0, attention_dropout=0.0),
    _encoder("hf-deberta", "deberta-v2", (*_PLAIN, ("torch.bmm(", KEYS[1])), attention="eager"),
    _encoder("hf-modernbert", "modernbert", num_hidden_layers=2, local_attention=4, global_attn_every_n_layers=2, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2),
    _encoder("hf-esm", "esm", position_embedding_type="rotary", mask_token_id=1, max_position_embeddings=64),
    Entry(
        "hf-fnet",
        of_transformers("AutoModelForMaskedLM", "fnet", "eager", vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=1, hidden_dropout_prob=0.0, pad_token_id=0),
        words,
        (1,),
        read=_logits,
        package="transformers",
        gathers=_PLAIN,
    ),
    Entry(
        "hf-t5-encoder",
        of_transformers("AutoModelForTextEncoding", "t5", **_T5),
        words,
        (1,),
        read=hidden,
        package="transformers",
        gathers=(KEYS,),
    ),
    Entry(
        "hf-t5",
        of_transformers("AutoModelForSeq2SeqLM", "t5", num_decoder_layers=1, decoder_start_token_id=0, **_T5),
        _pairs,
        (1, 1),
        call=lambda model, ids, decoded: model(input_ids=ids, decoder_input_ids=decoded).logits,
        package="transformers",
        gathers=(KEYS,),
    ),
    Entry(
        "hf-bart",
        of_transformers("AutoModelForSeq2SeqLM", "bart", max_position_embeddings=64, **_BOTH),
        _pairs,
        (1, 1),
        call=lambda model, ids, decoded: model(input_ids=ids, decoder_input_ids=decoded).logits,
        package="transformers",
        gathers=_PLAIN,
    ),
    Entry(
        "hf-whisper",
        of_transformers("AutoModelForSpeechSeq2Seq", "whisper", num_mel_bins=8, max_source_positions=8, max_target_positions=64, **_BOTH),
        lambda n: [torch.randn(2, 8, 2 * n), *words(n)],
        (2, 1),
        rows=(2, 1),
        call=lambda model, sound, decoded: model(input_features=sound, decoder_input_ids=decoded).logits,
        package="transformers",
        gathers=_PLAIN,
        sizes=(8, 8),
    ),
    Entry(
        "hf-wav2vec2",
        of_transformers("AutoModel", "wav2vec2", vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, conv_dim=[8, 8], conv_stride=[2, 2], conv_kernel=[3, 3], num_feat_extract_layers=2, num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, hidden_dropout=0.0, attention_dropout=0.0, feat_proj_dropout=0.0, activation_dropout=0.0, layerdrop=0.0, mask_time_prob=0.0, apply_spec_augment=False),
        lambda n: [torch.randn(2, 8 * n)],
        (1,),
        rows=(8,),
        read=hidden,
        package="transformers",
        gathers=(KEYS,),
    ),
    _x("x-decoder"),
    _x("x-rotary", rotary_pos_emb=True, ff_glu=True),
    _x("x-encoder", causal=False, use_rmsnorm=True),
]  # fmt: skip
