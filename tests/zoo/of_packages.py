"""Models of packages, which are imported where a model is made."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from zoo.entry import Entry

KEYS = (
    "attention",
    'needed: each row attends to all others; `config.attention = "ring"` sends blocks one after the other instead',
)

PLACES = (
    "laces",
    "needed: the gradient of a plain lookup is a plain tensor; a sum over the whole table of places would be more",
)
_EMBEDDINGS = (
    ("position_embeddings", PLACES[1]),
    ("token_type_embeddings", "not needed: the table has two rows, but plain ids look it up, which no op of ours sees"),
)


def _words(n: int) -> list[Tensor]:
    """Two sequences of n words."""
    return [torch.randint(3, 50, (2, n))]


def _logits(out: Any) -> Tensor:
    return out.logits


def _hidden(out: Any) -> Tensor:
    return out.last_hidden_state


def _of(auto: str, kind: str, attention: str = "sdpa", **sizes: Any) -> Callable[[], nn.Module]:
    """A model of transformers.

    Args:
        auto: the class that makes models of configurations.
        kind: of the model.
        attention: how it attends.
        sizes: of its configuration.
    """

    def make() -> nn.Module:
        transformers = importlib.import_module("transformers")
        config = transformers.AutoConfig.for_model(kind, **sizes)
        if hasattr(config, "use_cache"):
            config.use_cache = False
        return getattr(transformers, auto).from_config(config, attn_implementation=attention)

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


def _decoder(
    name: str,
    kind: str,
    gathers: tuple[tuple[str, str], ...] = (KEYS, *_EMBEDDINGS),
    dtype: torch.dtype = torch.float64,
    **sizes: Any,
) -> Entry:
    make = _of("AutoModelForCausalLM", kind, **{**_DECODER, **sizes})
    limit = 1e-9 if dtype is torch.float64 else 1e-4
    return Entry(
        name, make, _words, (1,), read=_logits, package="transformers", gathers=gathers, dtype=dtype, tolerance=limit
    )


def _encoder(name: str, kind: str, gathers: tuple[tuple[str, str], ...] = (KEYS, *_EMBEDDINGS), **sizes: Any) -> Entry:
    make = _of("AutoModelForMaskedLM", kind, **{**_ENCODER, **sizes})
    return Entry(name, make, _words, (1,), read=_logits, package="transformers", gathers=gathers)


def _graph(layer: str, *args: Any, **kwargs: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        layers = importlib.import_module("torch_geometric.nn")
        return getattr(layers, layer)(*args, **kwargs)

    return make


def _nodes_and_edges(n: int) -> list[Tensor]:
    return [torch.randn(n, 6), torch.randint(0, n, (2, 3 * n))]


_NODES = (
    ("index", "needed here: edges are cut as they come, and name nodes of all ranks; `sc.link_rows` fetches each once"),
    ("scatter", "needed here: likewise"),
)


def _of_graphs(name: str, layer: str, *args: Any, **kwargs: Any) -> Entry:
    make = _graph(layer, *args, **kwargs)
    return Entry(name, make, _nodes_and_edges, (0, 1), rows=(1, 3), package="torch_geometric", gathers=_NODES)


def _x_transformer(causal: bool = True, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        x = importlib.import_module("x_transformers")
        layer = x.Decoder if causal else x.Encoder
        layers = layer(dim=32, depth=1, heads=4, attn_dim_head=8, **options)
        return x.TransformerWrapper(num_tokens=50, max_seq_len=64, attn_layers=layers)

    return make


def _unet() -> nn.Module:
    diffusers = importlib.import_module("diffusers")
    return diffusers.UNet2DModel(
        sample_size=8, in_channels=2, out_channels=2, layers_per_block=1, block_out_channels=(8, 8), norm_num_groups=4,
        down_block_types=("DownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "UpBlock2D"),
        attention_head_dim=4,
    )  # fmt: skip


OF_PACKAGES = [
    _decoder("hf-llama", "llama"),
    _decoder("hf-mistral", "mistral", sliding_window=None),
    _decoder("hf-qwen2", "qwen2"),
    _decoder("hf-qwen3", "qwen3"),
    _decoder("hf-gemma2", "gemma2", dtype=torch.float32, attention="eager", query_pre_attn_scalar=8),
    _decoder("hf-phi3", "phi3"),
    _decoder("hf-olmo2", "olmo2"),
    _decoder("hf-gpt-neox", "gpt_neox"),
    _decoder("hf-gpt2", "gpt2", n_embd=32, n_layer=1, n_head=4, n_positions=64, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
    _decoder("hf-mixtral", "mixtral", dtype=torch.float32, num_local_experts=4, num_experts_per_tok=2),
    _decoder("hf-olmoe", "olmoe", dtype=torch.float32, num_experts=4, num_experts_per_tok=2),
    _decoder("hf-mamba", "mamba", attention="eager", state_size=4),
    _encoder("hf-bert", "bert"),
    _encoder("hf-roberta", "roberta"),
    _encoder("hf-electra", "electra", embedding_size=32),
    _encoder("hf-distilbert", "distilbert", dim=32, hidden_dim=64, n_layers=1, n_heads=4, dropout=0.0, attention_dropout=0.0),
    Entry(
        "hf-vit",
        _of("AutoModel", "vit", hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, image_size=8, patch_size=2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0),
        lambda n: [torch.randn(n, 3, 8, 8)],
        (0,),
        read=_hidden,
        package="transformers",
    ),
    Entry(
        "hf-dinov2",
        _of("AutoModel", "dinov2", hidden_size=32, num_hidden_layers=1, num_attention_heads=4, image_size=8, patch_size=2),
        lambda n: [torch.randn(n, 3, 8, 8)],
        (0,),
        read=_hidden,
        package="transformers",
    ),
    Entry(
        "hf-t5-encoder",
        _of("AutoModelForTextEncoding", "t5", vocab_size=50, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, dropout_rate=0.0),
        _words,
        (1,),
        read=_hidden,
        package="transformers",
        gathers=(KEYS,),
    ),
    Entry("x-decoder", _x_transformer(), _words, (1,), package="x_transformers", gathers=(KEYS,)),
    Entry("x-rotary", _x_transformer(rotary_pos_emb=True, ff_glu=True), _words, (1,), package="x_transformers", gathers=(KEYS,)),
    Entry("x-encoder", _x_transformer(causal=False, use_rmsnorm=True), _words, (1,), package="x_transformers", gathers=(KEYS,)),
    _of_graphs("pyg-gcn", "GCNConv", 6, 4, add_self_loops=False),
    _of_graphs("pyg-sage", "SAGEConv", 6, 4),
    _of_graphs("pyg-gat", "GATConv", 6, 4, heads=2, add_self_loops=False),
    _of_graphs("pyg-graph", "GraphConv", 6, 4),
    Entry(
        "diffusers-unet", _unet, lambda n: [torch.randn(2, 2, 2 * n, 8), torch.tensor([3, 5])], (2, None), rows=(2, 1),
        read=lambda out: out.sample, package="diffusers",
    ),
]  # fmt: skip
