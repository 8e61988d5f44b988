"""The one door to private names of torch. Supported range: 2.11 to 2.15.

Every private name that shardcompile relies on is imported in this folder, with the versions in which it was seen. What
most of the library needs is named here; modules beside this one serve one part of it. A test asserts that all names
exist in the installed version, so that an upgrade breaks in one folder with one message.
"""

from __future__ import annotations

from torch._guards import detect_fake_mode  # 2.11 - 2.15
from torch._inductor.custom_graph_pass import CustomGraphPass  # 2.11 - 2.15
from torch._ops import OpOverload, OpOverloadPacket  # 2.11 - 2.15
from torch._subclasses.fake_tensor import FakeTensorMode, is_fake  # 2.11 - 2.15

from shardcompile.compat.compiling import keep_ranks_alike, trace_size_obliviously
from shardcompile.compat.dynamo import (
    has_guarded_address,
    keep_from_dynamo,
    keep_protocol_from_dynamo,
    mark_static,
    mark_weakly_dynamic,
)
from shardcompile.compat.groups import (
    abort,
    coordinate,
    count_as_collective,
    current_mesh,
    group_name_of,
    let_comm_debug_mode_see_through,
    mesh_itself,
    process_group,
    register_work,
    store,
)
from shardcompile.compat.inductor import (
    inductor_has,
    lower_when_traced,
    preserve_node_ordering,
)
from shardcompile.compat.memory import (
    exchange_tensors,
    flatten_together,
    follow_view,
    forbid_writes_with_gradients,
    give_storage,
    share_storage,
    shares_storage,
    without_base,
)
from shardcompile.compat.nodes import last_repetition
from shardcompile.compat.replacements import without_guards
from shardcompile.compat.sizes import (
    expression_of,
    guard_or_false,
    is_one,
    is_specialised,
    is_unbacked,
    same_symbol,
    size_hint,
    specialise,
    statically_known_true,
    suggest_hint,
)
from shardcompile.compat.symbols import (
    first_input_size,
    from_first_symbols,
    global_extents,
    keep_first_proxies,
    keep_own_node,
    keep_symbol,
    note_input_size,
    once_in_trace,
    retrace,
    unrecorded_symbols,
)
from shardcompile.compat.torch_ops import (
    decomposition_by_torch,
    decomposition_of,
    functional_variant,
    is_written,
    kernel_of,
)
from shardcompile.compat.tracing import (
    UNKNOWN_OUTPUT_SHAPE,
    UNKNOWN_SIZE,
    annotate_nodes,
    fake_mode_like,
    imbalance_of,
    in_backward_pass,
    in_mode_of,
    is_compiling,
    is_traced,
    is_transforming,
    memo_of,
    note_imbalance,
    outside_trace,
    outside_transforms,
    refuse_unknown_shapes,
)
from shardcompile.compat.values import once_for_value
from shardcompile.compat.worlds import add_guard, forget_with_world, note_trace, start_epoch, world_epoch

__all__ = [
    "UNKNOWN_OUTPUT_SHAPE",
    "UNKNOWN_SIZE",
    "CustomGraphPass",
    "FakeTensorMode",
    "OpOverload",
    "OpOverloadPacket",
    "abort",
    "add_guard",
    "annotate_nodes",
    "coordinate",
    "count_as_collective",
    "current_mesh",
    "decomposition_by_torch",
    "decomposition_of",
    "detect_fake_mode",
    "exchange_tensors",
    "expression_of",
    "fake_mode_like",
    "first_input_size",
    "flatten_together",
    "follow_view",
    "forbid_writes_with_gradients",
    "forget_with_world",
    "from_first_symbols",
    "functional_variant",
    "give_storage",
    "global_extents",
    "group_name_of",
    "guard_or_false",
    "has_guarded_address",
    "imbalance_of",
    "in_backward_pass",
    "in_mode_of",
    "inductor_has",
    "is_compiling",
    "is_fake",
    "is_one",
    "is_specialised",
    "is_traced",
    "is_transforming",
    "is_unbacked",
    "is_written",
    "keep_first_proxies",
    "keep_from_dynamo",
    "keep_own_node",
    "keep_protocol_from_dynamo",
    "keep_ranks_alike",
    "keep_symbol",
    "kernel_of",
    "last_repetition",
    "let_comm_debug_mode_see_through",
    "lower_when_traced",
    "mark_static",
    "mark_weakly_dynamic",
    "memo_of",
    "mesh_itself",
    "note_imbalance",
    "note_input_size",
    "note_trace",
    "once_for_value",
    "once_in_trace",
    "outside_trace",
    "outside_transforms",
    "preserve_node_ordering",
    "process_group",
    "refuse_unknown_shapes",
    "register_work",
    "retrace",
    "same_symbol",
    "share_storage",
    "shares_storage",
    "size_hint",
    "specialise",
    "start_epoch",
    "statically_known_true",
    "store",
    "suggest_hint",
    "trace_size_obliviously",
    "unrecorded_symbols",
    "without_base",
    "without_guards",
    "world_epoch",
]
