"""Models of physics, of PhysicsNeMo and neuraloperator: points or the height of a field are sharded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo import packages
from tests.zoo.entry import Entry
from tests.zoo.words import BIAS, KEPT, KEYS, MARGINS, MODES, PARTS, PLACED, TABLE, WINDOWS


def _of(module: str, name: str, **sizes: Any) -> Callable[[], nn.Module]:
    return lambda: packages.of(f"physicsnemo.models.{module}", name)(**sizes)


def _nothing_dropped(module: str, name: str, **sizes: Any) -> Callable[[], nn.Module]:
    """Without whole branches that are left out at random, of which there is no switch."""

    def make() -> nn.Module:
        model: nn.Module = packages.of(f"physicsnemo.models.{module}", name)(**sizes)
        for part in model.modules():
            if hasattr(part, "drop_prob"):
                part.drop_prob = 0.0
        return model

    return make


def _operator(name: str, **sizes: Any) -> Callable[[], nn.Module]:
    return lambda: packages.of("neuralop.models", name)(in_channels=2, out_channels=1, hidden_channels=8, **sizes)


def _field(rows: int, width: int = 16, channels: int = 2, batch: int = 2) -> Callable[[int], list[Tensor]]:
    return lambda n: [torch.randn(batch, channels, rows * n, width)]


def _height(name: str, make: Callable[[], nn.Module], rows: int, package: str = "physicsnemo", **more: Any) -> Entry:
    more.setdefault("inputs", _field(rows))
    return Entry(name, make, partition=(2,), rows=(rows,), package=package, **more)


def _points(n: int) -> list[Tensor]:
    return [torch.randn(1, n, 2), torch.randn(1, n, 3)]


_OF_POINTS = {
    "functional_dim": 2,
    "out_dim": 1,
    "n_layers": 1,
    "n_hidden": 32,
    "n_head": 4,
    "slice_num": 4,
    "use_te": False,
}
_UNET = {
    "img_resolution": 32,
    "in_channels": 2,
    "out_channels": 2,
    "model_channels": 8,
    "channel_mult": [1, 2],
    "num_blocks": 1,
    "dropout": 0.0,
}
_FIXED = (8, 8)
_SINGLE = {"dtype": torch.float32, "tolerance": 1e-4}
"""Of models that hold weights of single precision whatever is asked for."""

OF_PHYSICS = [
    Entry("pn-transolver", _of("transolver", "Transolver", embedding_dim=3, **_OF_POINTS), _points, (1, 1), package="physicsnemo"),
    Entry("pn-flare", _of("flare", "FLARE", embedding_dim=3, **_OF_POINTS), _points, (1, 1), package="physicsnemo", gathers=(PARTS,)),
    Entry(
        "pn-geotransolver",
        _of("geotransolver", "GeoTransolver", geometry_dim=3, **_OF_POINTS),
        _points,
        (1, 1),
        call=lambda model, x, geometry: model(x, geometry=geometry),
        package="physicsnemo",
    ),
    Entry("pn-perceptron", _of("mlp", "FullyConnected", in_features=3, layer_size=16, out_features=2, num_layers=2), lambda n: [torch.randn(n, 3)], (0,), package="physicsnemo"),
    _height("pn-afno", _of("afno", "AFNO", inp_shape=[16, 16], in_channels=2, out_channels=2, patch_size=[2, 2], embed_dim=16, depth=1, num_blocks=2), 2, gathers=PLACED, sizes=_FIXED, **_SINGLE),
    _height("pn-fno", _of("fno", "FNO", in_channels=2, out_channels=2, latent_channels=8, num_fno_layers=1, num_fno_modes=3, padding=2), 2, graphs=2, gathers=(MODES,)),
    _height("pn-pangu", _nothing_dropped("pangu", "Pangu", img_size=(32, 24), patch_size=(2, 4, 4), embed_dim=8, num_heads=(2, 2, 2, 2), window_size=(2, 2, 3)), 4, inputs=_field(4, 24, 72, 1), read=lambda out: out[1], sizes=_FIXED, gathers=(*BIAS, *WINDOWS)),
    Entry(
        "pn-song-unet",
        _of("diffusion_unets", "SongUNet", attn_resolutions=[], bottleneck_attention=False, **_UNET),
        lambda n: [torch.randn(2, 2, 4 * n, 16), torch.rand(2)],
        (2, None),
        rows=(4, 1),
        call=lambda model, x, noise: model(x, noise, None),
        package="physicsnemo",
    ),
    Entry(
        "pn-song-unet-attention",
        _of("diffusion_unets", "SongUNet", attn_resolutions=[16], **_UNET),
        lambda n: [torch.randn(2, 2, 4 * n, 16), torch.rand(2)],
        (2, None),
        rows=(4, 1),
        call=lambda model, x, noise: model(x, noise, None),
        package="physicsnemo",
        gathers=(KEYS,),
    ),
    Entry(
        "pn-dit",
        _of("dit", "DiT", input_size=(16, 16), in_channels=2, patch_size=(2, 2), hidden_size=32, depth=1, num_heads=4),
        lambda n: [torch.randn(2, 2, 2 * n, 16), torch.rand(2)],
        (2, None),
        rows=(2, 1),
        package="physicsnemo",
        gathers=(KEYS, TABLE),
        sizes=_FIXED,
    ),
    Entry(
        "pn-unet-3d",
        _of("unet", "UNet", in_channels=2, out_channels=1, model_depth=2, feature_map_channels=[8, 8, 8, 8], num_conv_blocks=2, normalization_args={"num_groups": 4}, gradient_checkpointing=False),
        lambda n: [torch.randn(1, 2, 2 * n, 4, 4)],
        (2,),
        rows=(2,),
        package="physicsnemo",
    ),
    Entry(
        "pn-dpot",
        _of("dpot", "DPOTNet", inp_shape=16, patch_size=2, in_channels=2, out_channels=2, num_blocks=2, embed_dim=16, out_layer_dim=8, depth=1, modes=3, norm_groups=4),
        lambda n: [torch.randn(2, 2 * n, 16, 1, 2)],
        (1,),
        rows=(2,),
        package="physicsnemo",
        graphs=2,
        sizes=_FIXED,
        gathers=KEPT,
        **_SINGLE,
    ),
    _height("pn-pix2pix", _of("pix2pix", "Pix2Pix", in_channels=2, out_channels=2, dimension=2, conv_layer_size=8, n_downsampling=1, n_upsampling=1, n_blocks=1), 4, gathers=(MARGINS,)),
    _height("no-fno", _operator("FNO", n_modes=(4, 4), n_layers=1), 2, "neuralop", **_SINGLE),
    _height("no-tfno", _operator("FNO", n_modes=(4, 4), n_layers=1, factorization="tucker", rank=0.5), 2, "neuralop", **_SINGLE),
    _height("no-uno", _operator("UNO", lifting_channels=8, projection_channels=8, n_layers=3, uno_out_channels=[8] * 3, uno_n_modes=[[4, 4]] * 3, uno_scalings=[[1, 1], [0.5, 0.5], [2, 2]], channel_mlp_skip="linear"), 2, "neuralop", **_SINGLE),
]  # fmt: skip
