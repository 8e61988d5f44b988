"""The ops of PyTorch's operator database by what kind of mathematics they do, for the table of a sweep."""

from __future__ import annotations

from torch.testing._internal.opinfo.core import BinaryUfuncInfo, ReductionOpInfo, SpectralFuncInfo, UnaryUfuncInfo

from tests.support import op_db

_BY_CLASS = {
    UnaryUfuncInfo: "pointwise",
    BinaryUfuncInfo: "pointwise",
    ReductionOpInfo: "reductions",
    SpectralFuncInfo: "Fourier transforms",
}

_BY_NAME = {
    "pointwise": """
        addcdiv addcmul bucketize clamp clone contiguous full_like lerp logaddexp2 masked.logaddexp masked_fill
        native_dropout_backward new_full new_ones new_zeros nn.functional.gelu nn.functional.glu
        nn.functional.hardswish nn.functional.leaky_relu ones_like resolve_conj resolve_neg to unravel_index where
        zero_ zeros_like
    """,
    "reductions": """
        aminmax dist dot linalg.matrix_norm linalg.norm linalg.norm.subgradients_at_zero linalg.vecdot logsumexp
        max.reduction_no_dim max.reduction_with_dim min.reduction_no_dim min.reduction_with_dim norm norm.fro norm.inf
        std_mean std_mean.unbiased sum_to_size trace trapezoid trapz var_mean var_mean.unbiased vdot
    """,
    "matrix products": """
        __rmatmul__ addbmm addmm addmm.decomposed addmv addr baddbmm bmm bmm.triton_optimized einsum inner kron
        linalg.matrix_power linalg.multi_dot matmul mm mv nn.functional.bilinear nn.functional.linear outer tensordot
    """,
    "views that keep the dim": """
        H T alias_copy atleast_1d atleast_2d atleast_3d broadcast_tensors broadcast_to expand expand_as expand_copy
        flatten mH mT movedim permute permute_copy ravel reshape reshape_as squeeze squeeze.multiple squeeze_copy
        swapaxes t t_copy transpose transpose_copy unflatten unsqueeze unsqueeze_copy view view_as view_as_complex
        view_as_real view_copy nn.functional.channel_shuffle nn.functional.pixel_shuffle nn.functional.pixel_unshuffle
    """,
    "normalisations": """
        _batch_norm_with_update _native_batch_norm_legit masked.normalize native_batch_norm native_group_norm
        native_layer_norm nn.functional.batch_norm nn.functional.group_norm nn.functional.instance_norm
        nn.functional.layer_norm nn.functional.local_response_norm nn.functional.normalize nn.functional.rms_norm renorm
    """,
    "softmax": """
        _softmax_backward_data log_softmax log_softmax.with_dtype masked.log_softmax masked.softmax masked.softmin
        nn.functional.multi_head_attention_forward nn.functional.scaled_dot_product_attention nn.functional.softmin
        nn.functional.softmin.with_dtype softmax softmax.with_dtype torch.ops.aten._safe_softmax.default
    """,
    "cat, split, slice": """
        __getitem__ _chunk_cat block_diag cat chunk column_stack dsplit dstack hsplit hstack narrow narrow_copy select
        select_scatter slice slice_scatter split split.list_args split_with_sizes split_with_sizes_copy stack
        tensor_split unbind unbind_copy unsafe_chunk unsafe_split vsplit vstack
    """,
    "padding": """
        constant_pad_nd nn.functional.pad.circular nn.functional.pad.constant nn.functional.pad.reflect
        nn.functional.pad.replicate nn.functional.pad.replicate_negative
    """,
    "cumulative": """
        cummax cummin cumprod cumsum cumulative_trapezoid diff gradient logcumsumexp masked.cumprod masked.cumsum
    """,
    "sort and topk": "argsort kthvalue median mode msort nanmedian nanquantile quantile sort topk masked.median",
    "losses": """
        nn.functional.binary_cross_entropy nn.functional.binary_cross_entropy_with_logits
        nn.functional.cosine_embedding_loss nn.functional.cosine_similarity nn.functional.cross_entropy
        nn.functional.gaussian_nll_loss nn.functional.hinge_embedding_loss nn.functional.huber_loss
        nn.functional.kl_div nn.functional.l1_loss nn.functional.linear_cross_entropy
        nn.functional.linear_cross_entropy.chunked nn.functional.linear_cross_entropy.chunked_none
        nn.functional.margin_ranking_loss nn.functional.mse_loss nn.functional.multi_margin_loss
        nn.functional.multilabel_margin_loss nn.functional.multilabel_soft_margin_loss nn.functional.nll_loss
        nn.functional.pairwise_distance nn.functional.poisson_nll_loss nn.functional.smooth_l1_loss
        nn.functional.soft_margin_loss nn.functional.triplet_margin_loss
        nn.functional.triplet_margin_with_distance_loss
    """,
    "embedding": "nn.functional.embedding nn.functional.embedding_bag nn.functional.one_hot",
    "flips, rolls, repeats": "fft.fftshift fft.ifftshift flip fliplr flipud repeat roll rot90 tile tril triu",
    "indexing": """
        _unsafe_masked_index _unsafe_masked_index_put_accumulate gather index_add index_copy index_fill index_put
        index_reduce.amax index_reduce.amin index_reduce.mean index_reduce.prod index_select masked_scatter put
        repeat_interleave scatter scatter_add scatter_reduce.amax scatter_reduce.amin scatter_reduce.mean
        scatter_reduce.prod scatter_reduce.sum take take_along_dim
    """,
    "images": """
        _upsample_bilinear2d_aa grid_sampler_2d grid_sampler_3d max_pool2d_with_indices_backward
        nn.functional.adaptive_avg_pool1d nn.functional.adaptive_avg_pool2d nn.functional.adaptive_avg_pool3d
        nn.functional.adaptive_max_pool1d nn.functional.adaptive_max_pool2d nn.functional.adaptive_max_pool3d
        nn.functional.avg_pool1d nn.functional.avg_pool2d nn.functional.avg_pool3d nn.functional.conv1d
        nn.functional.conv2d nn.functional.conv3d nn.functional.conv_transpose1d nn.functional.conv_transpose2d
        nn.functional.conv_transpose3d nn.functional.grid_sample nn.functional.interpolate.area
        nn.functional.interpolate.bicubic nn.functional.interpolate.bilinear nn.functional.interpolate.linear
        nn.functional.interpolate.nearest nn.functional.interpolate.nearest-exact
        nn.functional.interpolate.trilinear nn.functional.max_pool1d nn.functional.max_pool2d nn.functional.max_pool3d
        nn.functional.max_unpool1d nn.functional.max_unpool1d.grad nn.functional.max_unpool2d
        nn.functional.max_unpool2d.grad nn.functional.max_unpool3d nn.functional.max_unpool3d.grad
        nn.functional.unfold nn.functional.upsample_bilinear nn.functional.upsample_nearest
    """,
}

SHOULD_NOT_GATHER = (
    "pointwise",
    "reductions",
    "matrix products",
    "views that keep the dim",
    "normalisations",
    "softmax",
    "cat, split, slice",
    "padding",
    "cumulative",
    "sort and topk",
    "losses",
    "embedding",
)
"""Families whose mathematics can do without a gather; of sorting, along another dim than the partition one."""

_FAMILIES = {name: family for family, names in _BY_NAME.items() for name in names.split()}


def family_of(name: str) -> str:
    """The family of an op of the database by its name there."""
    return _FAMILIES.get(name) or _BY_CLASS.get(type(op_db.OPS[name]), "linear algebra and the rest")
