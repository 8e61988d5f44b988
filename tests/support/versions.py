"""Tests that do not hold for all supported releases of torch, and why."""

from __future__ import annotations

import pytest
import torch

NO_MESH = "Dynamo cannot pass a mesh to what makes sharded tensors (docs/limits.md)"
OWN_WORDS = "Dynamo refuses higher-order ops in its own words, before we see them"
NOT_CACHED = "AOTAutograd's cache keeps no graph with ops of ours"
SIZES_OF_A_TENSOR = "Dynamo takes tensors in arguments of `redistribute` for constants"
OTHER_STRIDES = "meta kernels of Fourier transforms state other strides than kernels return"
OTHER_REPORTS = "other lines of the program are noted for backward passes"

FROM_2_12: dict[str, str] = {
    "test_a_function_matches_on_a_mesh_of_two_dims_with_named_inputs_and_stated_sizes": "powers of symbols do not compile",
    "test_a_plain_lookup": OTHER_REPORTS,
    "test_a_tensor_says_the_sizes_of_shards[aot_eager]": SIZES_OF_A_TENSOR,
    "test_a_tensor_says_the_sizes_of_shards[eager]": SIZES_OF_A_TENSOR,
    "test_a_tensor_says_the_sizes_of_shards[inductor]": SIZES_OF_A_TENSOR,
    "test_shards_of_known_partition_that_are_joined_stay_so_where_one_is_empty": NO_MESH,
    "test_shards_that_do_not_belong_together_are_found_inside_a_compiled_function": NO_MESH,
    "test_communication_of_eight_gpus[Points]": OTHER_REPORTS,
    "test_compiled[Higher-order ops: `nested_compile_region`]": OWN_WORDS,
    "test_compiled[Higher-order ops: `while_loop`]": OWN_WORDS,
    "test_eager[Higher-order ops: `cond`": OWN_WORDS,
    "test_eager[Higher-order ops: `map`": OWN_WORDS,
    "test_eager[Higher-order ops: `scan`": OWN_WORDS,
    "test_eager[Higher-order ops: `while_loop`": OWN_WORDS,
    "test_size_and_key_of_a_partition_are_on_the_host": NO_MESH,
    "test_factories_inside_a_compiled_function": NO_MESH,
    "test_from_local_inside_a_compiled_function": NO_MESH,
    "test_gathers_by_hand[along_columns]": "all_gather_tensor demands contiguous shards",
    "test_local_map_around_a_local_kernel[True]": NO_MESH,
    "test_looking_inside": OTHER_REPORTS,
    "test_random_factories_draw_the_same_inside_a_compiled_function": NO_MESH,
    "test_sends_what_its_golden_file_says[gpt2]": OTHER_REPORTS,
    "test_surrogate_communication_on_eight_gpus": OTHER_REPORTS,
    "test_the_current_mesh_is_the_default_inside_a_compiled_function": NO_MESH,
    "test_what_makes_sharded_tensors_inside_is_compiled_for_its_world": NO_MESH,
    "test_a_difference_between_warm_ranks_is_named[forward-aot_autograd]": NOT_CACHED,
    "test_a_difference_between_warm_ranks_is_named[backward-aot_autograd]": NOT_CACHED,
    "test_a_warm_start_is_compared_as_a_cold_one[aot_autograd]": NOT_CACHED,
    "test_code_without_a_record_is_not_used_where_ranks_compare[aot_autograd]": NOT_CACHED,
    "test_warm_and_cold_ranks_agree_in_whatever_order_they_compile[aot_autograd]": NOT_CACHED,
    "test_a_compiled_function_wraps_a_plain_shard_by_stated_sizes": NO_MESH,
    "test_compiled_with_aot_eager": NO_MESH,
    "test_factories_of_known_sizes_meet_inputs_inside_a_compiled_function": NO_MESH,
    "test_factories_of_known_sizes_on_ranks_that_are_processes": NO_MESH,
    "test_local_shards_of_any_size_given_to_from_local_inside": NO_MESH,
    "test_sizes_of_plain_inputs_that_differ_by_rank_do_not_change_the_plan": NO_MESH,
    "test_a_sample_of_the_programs": OTHER_STRIDES,
    "test_strides_of_a_shard_without_rows_are_no_matter_to_complex_numbers": OTHER_STRIDES,
    "test_jagged_values_are_those_of_plain_pytorch[a part]": "a copy of a part with an unknown number of rows is refused",
    "test_ranks_compile_nothing": NOT_CACHED,
}
"""By what a test's name begins with, what torch 2.11 lacks for it. The tests hold from 2.12 on."""


def skip_what_torch_lacks(items: list[pytest.Item]) -> None:
    """Skip the tests that the installed torch is too old for."""
    if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12):
        return
    for item in items:
        reason = next((why for name, why in FROM_2_12.items() if item.name.startswith(name)), None)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=f"torch {torch.__version__}: {reason}"))
