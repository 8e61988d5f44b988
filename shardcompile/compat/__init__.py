"""The one door to private names of torch. Supported range: 2.11 to 2.15.

Every private name that shardcompile relies on is imported in this folder, with the versions in which it was seen. What
most of the library needs is named here; modules beside this one serve one part of it. If a version of torch lacks a
name, the import fails in this folder, with one message.
"""

from __future__ import annotations

from torch._guards import detect_fake_mode as detect_fake_mode  # 2.11 - 2.15
from torch._inductor.custom_graph_pass import CustomGraphPass as CustomGraphPass  # 2.11 - 2.15
from torch._ops import OpOverload as OpOverload  # 2.11 - 2.15
from torch._ops import OpOverloadPacket as OpOverloadPacket  # 2.11 - 2.15
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode  # 2.11 - 2.15
from torch._subclasses.fake_tensor import is_fake as is_fake  # 2.11 - 2.15

from shardcompile.compat.backward_inputs import saved_for_backward as saved_for_backward
from shardcompile.compat.compiled_once import keys_of_all_ranks as keys_of_all_ranks
from shardcompile.compat.compiled_once import keys_tell_the_rank as keys_tell_the_rank
from shardcompile.compat.compiled_once import world_rank as world_rank
from shardcompile.compat.compiling import make_decisions_rank_invariant as make_decisions_rank_invariant
from shardcompile.compat.compiling import trace_size_obliviously as trace_size_obliviously
from shardcompile.compat.dynamo import has_guarded_address as has_guarded_address
from shardcompile.compat.dynamo import keep_from_dynamo as keep_from_dynamo
from shardcompile.compat.dynamo import keep_protocol_from_dynamo as keep_protocol_from_dynamo
from shardcompile.compat.dynamo import make_known_to_einops as make_known_to_einops
from shardcompile.compat.dynamo import mark_static as mark_static
from shardcompile.compat.dynamo import mark_weakly_dynamic as mark_weakly_dynamic
from shardcompile.compat.engine import backward_pass as backward_pass
from shardcompile.compat.engine import gradients_are_read_while_backward_runs as gradients_are_read_while_backward_runs
from shardcompile.compat.engine import run_after_others as run_after_others
from shardcompile.compat.groups import abort as abort
from shardcompile.compat.groups import common_name as common_name
from shardcompile.compat.groups import coordinate as coordinate
from shardcompile.compat.groups import current_mesh as current_mesh
from shardcompile.compat.groups import describe_mesh as describe_mesh
from shardcompile.compat.groups import group_name_of as group_name_of
from shardcompile.compat.groups import has_other_ranks as has_other_ranks
from shardcompile.compat.groups import let_comm_debug_mode_see_through as let_comm_debug_mode_see_through
from shardcompile.compat.groups import mesh_itself as mesh_itself
from shardcompile.compat.groups import process_group as process_group
from shardcompile.compat.groups import register_work as register_work
from shardcompile.compat.groups import store as store
from shardcompile.compat.inductor import compile_with_inductor as compile_with_inductor
from shardcompile.compat.inductor import inductor_has as inductor_has
from shardcompile.compat.inductor import load_inductor as load_inductor
from shardcompile.compat.inductor import lower_when_traced as lower_when_traced
from shardcompile.compat.inductor import preserve_node_ordering as preserve_node_ordering
from shardcompile.compat.memory import NO_MEMORY as NO_MEMORY
from shardcompile.compat.memory import exchange_tensors as exchange_tensors
from shardcompile.compat.memory import flatten_together as flatten_together
from shardcompile.compat.memory import follow_view as follow_view
from shardcompile.compat.memory import forbid_writes_with_gradients as forbid_writes_with_gradients
from shardcompile.compat.memory import give_storage as give_storage
from shardcompile.compat.memory import refuse_pointer as refuse_pointer
from shardcompile.compat.memory import share_storage as share_storage
from shardcompile.compat.memory import shares_storage as shares_storage
from shardcompile.compat.memory import torch_compares_memory as torch_compares_memory
from shardcompile.compat.memory import without_base as without_base
from shardcompile.compat.nodes import last_repetition as last_repetition
from shardcompile.compat.replacements import without_guards as without_guards
from shardcompile.compat.sizes import divides as divides
from shardcompile.compat.sizes import expression_of as expression_of
from shardcompile.compat.sizes import guard_equal as guard_equal
from shardcompile.compat.sizes import guard_or_false as guard_or_false
from shardcompile.compat.sizes import has_no_hint as has_no_hint
from shardcompile.compat.sizes import is_one as is_one
from shardcompile.compat.sizes import is_specialised as is_specialised
from shardcompile.compat.sizes import is_unbacked as is_unbacked
from shardcompile.compat.sizes import quotient as quotient
from shardcompile.compat.sizes import size_hint as size_hint
from shardcompile.compat.sizes import specialise as specialise
from shardcompile.compat.sizes import statically_known_true as statically_known_true
from shardcompile.compat.sizes import suggest_hint as suggest_hint
from shardcompile.compat.sizes import was_specialised as was_specialised
from shardcompile.compat.strides import return_strides_after_sizes as return_strides_after_sizes
from shardcompile.compat.symbols import from_first_symbols as from_first_symbols
from shardcompile.compat.symbols import global_sizes as global_sizes
from shardcompile.compat.symbols import inputs_noted as inputs_noted
from shardcompile.compat.symbols import keep_first_proxies as keep_first_proxies
from shardcompile.compat.symbols import keep_own_node as keep_own_node
from shardcompile.compat.symbols import keep_symbol as keep_symbol
from shardcompile.compat.symbols import note_input as note_input
from shardcompile.compat.symbols import once_in_trace as once_in_trace
from shardcompile.compat.symbols import retrace as retrace
from shardcompile.compat.symbols import unrecorded_symbols as unrecorded_symbols
from shardcompile.compat.threads import hold_device_guard as hold_device_guard
from shardcompile.compat.threads import ranks_are_threads as ranks_are_threads
from shardcompile.compat.torch_ops import decomposition_by_torch as decomposition_by_torch
from shardcompile.compat.torch_ops import decomposition_of as decomposition_of
from shardcompile.compat.torch_ops import factory_arguments as factory_arguments
from shardcompile.compat.torch_ops import functional_variant as functional_variant
from shardcompile.compat.torch_ops import is_written as is_written
from shardcompile.compat.torch_ops import kernel_of as kernel_of
from shardcompile.compat.torch_ops import written_by_results as written_by_results
from shardcompile.compat.tracing import UNKNOWN_OUTPUT_SHAPE as UNKNOWN_OUTPUT_SHAPE
from shardcompile.compat.tracing import UNKNOWN_SIZE as UNKNOWN_SIZE
from shardcompile.compat.tracing import annotate_nodes as annotate_nodes
from shardcompile.compat.tracing import below_autograd as below_autograd
from shardcompile.compat.tracing import compiles_backward_passes as compiles_backward_passes
from shardcompile.compat.tracing import dispatch_is_off as dispatch_is_off
from shardcompile.compat.tracing import fake_mode_like as fake_mode_like
from shardcompile.compat.tracing import has_modes as has_modes
from shardcompile.compat.tracing import imbalance_of as imbalance_of
from shardcompile.compat.tracing import in_backward_pass as in_backward_pass
from shardcompile.compat.tracing import in_mode_of as in_mode_of
from shardcompile.compat.tracing import is_compiling as is_compiling
from shardcompile.compat.tracing import is_fake_outside_traces as is_fake_outside_traces
from shardcompile.compat.tracing import is_traced as is_traced
from shardcompile.compat.tracing import is_transforming as is_transforming
from shardcompile.compat.tracing import memo_of as memo_of
from shardcompile.compat.tracing import note_imbalance as note_imbalance
from shardcompile.compat.tracing import outside_trace as outside_trace
from shardcompile.compat.tracing import outside_transforms as outside_transforms
from shardcompile.compat.tracing import refuse_unknown_shapes as refuse_unknown_shapes
from shardcompile.compat.tracing import tracer_of as tracer_of
from shardcompile.compat.tracing import with_dispatch as with_dispatch
from shardcompile.compat.values import DEAD_EXCHANGE as DEAD_EXCHANGE
from shardcompile.compat.values import WeakIdKeyDictionary as WeakIdKeyDictionary
from shardcompile.compat.values import is_new_zeros as is_new_zeros
from shardcompile.compat.values import made_for_value as made_for_value
from shardcompile.compat.values import mark_dead as mark_dead
from shardcompile.compat.values import note_local as note_local
from shardcompile.compat.values import once_for_tensor as once_for_tensor
from shardcompile.compat.values import once_for_value as once_for_value
from shardcompile.compat.worlds import add_guard as add_guard
from shardcompile.compat.worlds import forget_with_world as forget_with_world
from shardcompile.compat.worlds import note_trace as note_trace
from shardcompile.compat.worlds import start_epoch as start_epoch
from shardcompile.compat.worlds import world_epoch as world_epoch
