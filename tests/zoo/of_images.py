"""Models of images, of transformers, timm and diffusers: sharded along the height where their sizes allow it, or the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo import packages
from tests.zoo.entry import Entry
from tests.zoo.of_text import hidden, of_transformers, words
from tests.zoo.words import KEYS, NORMS


def _pictures(n: int) -> list[Tensor]:
    """A batch of n."""
    return [torch.randn(n, 3, 8, 8)]


def _high(rows: int, width: int = 8, channels: int = 3, batch: int = 2) -> Callable[[int], list[Tensor]]:
    return lambda n: [torch.randn(batch, channels, rows * n, width)]


def _of(module: str, name: str, **sizes: Any) -> Callable[[], nn.Module]:
    return lambda: packages.of(module, name)(**sizes)


def _resnet() -> nn.Module:
    block = packages.of("timm.models.resnet", "BasicBlock")
    return packages.of("timm.models", "ResNet")(
        block=block, layers=(1, 1, 1, 1), num_classes=5, channels=(8, 8, 16, 16), stem_width=8
    )


def _dit() -> nn.Module:
    """Without labels that are dropped at random, of which there is no switch: Inductor draws other numbers."""
    model: nn.Module = packages.of("diffusers", "DiTTransformer2DModel")(
        num_attention_heads=4, attention_head_dim=8, in_channels=2, num_layers=1, sample_size=8, patch_size=2, num_embeds_ada_norm=10, norm_num_groups=2
    )  # fmt: skip
    for part in model.modules():
        if hasattr(part, "dropout_prob"):
            part.dropout_prob = 0.0
    return model


def _clip() -> nn.Module:
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = packages.of("transformers", "CLIPConfig")(
        text_config={
            "vocab_size": 50, "max_position_embeddings": 64, "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0, **size
        },
        vision_config={"image_size": 8, "patch_size": 4, **size},
        projection_dim=16,
    )  # fmt: skip
    return packages.of("transformers", "CLIPModel")(config)


_SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "image_size": 8,
    "patch_size": 2,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def _batch(name: str, make: Callable[[], nn.Module], package: str, **more: Any) -> Entry:
    return Entry(name, make, _pictures, (0,), package=package, **more)


def _height(name: str, make: Callable[[], nn.Module], package: str, rows: int, **more: Any) -> Entry:
    more.setdefault("inputs", _high(rows))
    return Entry(name, make, partition=(2,), rows=(rows,), package=package, **more)


def _sample(out: Any) -> Tensor:
    return out.sample


OF_IMAGES = [
    _batch("hf-vit", of_transformers("AutoModel", "vit", intermediate_size=64, **_SMALL), "transformers", read=hidden),
    _batch("hf-dinov2", of_transformers("AutoModel", "dinov2", **_SMALL), "transformers", read=hidden),
    _batch(
        "hf-swin",
        of_transformers("AutoModel", "swin", image_size=8, patch_size=1, embed_dim=8, depths=[2, 1], num_heads=[2, 2], window_size=4, drop_path_rate=0.0),
        "transformers",
        read=hidden,
    ),
    Entry(
        "hf-clip",
        _clip,
        lambda n: [words(8)[0][:1].repeat(n, 1).add(torch.arange(n)[:, None]).remainder(47) + 3, *_pictures(n)],
        (0, 0),
        call=lambda model, ids, pictures: model(input_ids=ids, pixel_values=pictures).logits_per_image,
        package="transformers",
        gathers=(("logits_per_text = ", "needed: each text is compared with each picture"),),
    ),
    Entry(
        "hf-patchtst",
        of_transformers("AutoModel", "patchtst", num_input_channels=2, context_length=32, patch_length=4, patch_stride=4, d_model=32, num_hidden_layers=1, num_attention_heads=4, ffn_dim=64, attention_dropout=0.0, ff_dropout=0.0, positional_dropout=0.0, path_dropout=0.0, head_dropout=0.0),
        lambda n: [torch.randn(n, 32, 2)],
        (0,),
        read=hidden,
        package="transformers",
        gathers=(NORMS,),
    ),
    _height(
        "hf-segformer",
        of_transformers("AutoModelForSemanticSegmentation", "segformer", "eager", num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[8, 16], patch_sizes=[3, 3], strides=[2, 2], num_attention_heads=[1, 2], mlp_ratios=[2, 2], decoder_hidden_size=8, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, classifier_dropout_prob=0.0, drop_path_rate=0.0),
        "transformers",
        4,
        read=lambda out: out.logits,
        gathers=(KEYS,),
    ),
    _height("hf-convnext", of_transformers("AutoModel", "convnext", "eager", patch_size=2, hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, drop_path_rate=0.0), "transformers", 4, read=hidden),
    _height("hf-resnet", of_transformers("AutoModel", "resnet", "eager", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic"), "transformers", 8, read=hidden, gathers=(NORMS,)),
    _batch("timm-vit", _of("timm.models", "VisionTransformer", img_size=8, patch_size=2, embed_dim=32, depth=1, num_heads=4, num_classes=5), "timm"),
    _height(
        "timm-vit-height",
        _of("timm.models", "VisionTransformer", img_size=8, patch_size=2, embed_dim=32, depth=1, num_heads=4, num_classes=5, class_token=False, global_pool="avg", dynamic_img_size=True, pos_embed="none"),
        "timm",
        2,
        gathers=(KEYS,),
        graphs=2,
    ),
    _batch("timm-swin", _of("timm.models", "SwinTransformer", img_size=8, patch_size=1, embed_dim=8, depths=(2,), num_heads=(2,), window_size=4, num_classes=5, drop_path_rate=0.0), "timm"),
    _batch("timm-mixer", _of("timm.models", "MlpMixer", num_classes=5, img_size=8, patch_size=2, num_blocks=1, embed_dim=16), "timm"),
    _height("timm-resnet", _resnet, "timm", 8, inputs=_high(8, 32), gathers=(NORMS,)),
    _height("timm-convnext", _of("timm.models", "ConvNeXt", depths=(1, 1, 1, 1), dims=(8, 8, 16, 16), num_classes=5, patch_size=2), "timm", 16, inputs=_high(16, 32)),
    Entry(
        "diffusers-unet",
        _of("diffusers", "UNet2DModel", sample_size=8, in_channels=2, out_channels=2, layers_per_block=1, block_out_channels=(8, 8), norm_num_groups=4, down_block_types=("DownBlock2D",) * 2, up_block_types=("UpBlock2D",) * 2, attention_head_dim=4),
        lambda n: [torch.randn(2, 2, 2 * n, 8), torch.tensor([3, 5])],
        (2, None),
        rows=(2, 1),
        read=_sample,
        package="diffusers",
        gathers=(KEYS,),
    ),
    Entry(
        "diffusers-unet-text",
        _of("diffusers", "UNet2DConditionModel", sample_size=8, in_channels=2, out_channels=2, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), block_out_channels=(8, 8), layers_per_block=1, norm_num_groups=4, cross_attention_dim=16, attention_head_dim=4),
        lambda n: [torch.randn(2, 2, 2 * n, 8), torch.tensor([3, 5]), torch.randn(2, 5, 16)],
        (2, None, None),
        rows=(2, 1, 1),
        read=_sample,
        package="diffusers",
        gathers=(KEYS,),
    ),
    Entry(
        "diffusers-dit",
        _dit,
        lambda n: [torch.randn(n, 2, 8, 8), torch.arange(n), torch.arange(n) % 10],
        (0, 0, 0),
        read=_sample,
        package="diffusers",
    ),
    _height(
        "diffusers-vae",
        _of("diffusers", "AutoencoderKL", block_out_channels=(8, 8), down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2, norm_num_groups=4, latent_channels=2, sample_size=16, mid_block_add_attention=False),
        "diffusers",
        2,
        read=_sample,
    ),
]  # fmt: skip
