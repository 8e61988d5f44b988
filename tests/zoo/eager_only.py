"""Models that are compared in eager mode alone, and why."""

from __future__ import annotations

_FAILS = {
    "hf-mamba": "its scan takes 96 collectives; the comparison did not end within four minutes on a busy machine",
    "hf-mamba2": "a slice of the last place of a chunk has a symbolic extent, which the trace does not find to be one",
    "hf-wav2vec2": "the model sets requires_grad of an activation, which Dynamo cannot trace",
    "pn-fno": "a padded spectrum's extent depends on the cut, and the sum with it asks whether it is even",
}
_NOT_TRIED = """
    hf-deberta hf-modernbert hf-esm hf-fnet hf-t5-encoder hf-t5 hf-bart hf-whisper x-decoder x-rotary
    x-encoder hf-dinov2 hf-swin hf-clip hf-patchtst hf-segformer hf-convnext hf-resnet timm-vit-height
    timm-swin timm-resnet timm-convnext diffusers-unet diffusers-unet-text diffusers-dit diffusers-vae
    pyg-sage pyg-gat pyg-graph pyg-gin pyg-transformer pn-transolver pn-afno pn-pangu pn-song-unet
    pn-song-unet-attention pn-dit pn-unet-3d pn-dpot pn-pix2pix no-fno no-tfno no-uno
"""

EAGER_ONLY = {**_FAILS, **dict.fromkeys(_NOT_TRIED.split(), "not compared yet when compiled")}
"""By name, the reason."""
