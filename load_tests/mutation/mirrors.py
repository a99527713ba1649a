"""Which test files mirror a file of the code: the one of its name, in its own folder or above, and those that say they test what it does."""

from pathlib import PurePosixPath

from load_tests.mutation.mutant import ROOT

_FURTHER_TESTS = {
    "edge_router/admission.py": "edge_router/test_access edge_router/test_limits",
    "edge_router/durable.py": "edge_router/test_journal",
    "edge_router/finetunes.py": "edge_router/test_routed_finetunes edge_router/test_data_places",
    "edge_router/ledger/accounting.py": "edge_router/ledger/test_ledger edge_router/quotas/test_daily edge_router/test_usage "
    "edge_router/test_access",
    "edge_router/ledger/ledger.py": "edge_router/ledger/test_store edge_router/ledger/test_site_usage",
    "edge_router/ledger/postgres_store.py": "edge_router/ledger/test_store edge_router/ledger/test_ledger "
    "edge_router/ledger/test_site_usage",
    "edge_router/ledger/site_usage.py": "edge_router/test_usage",
    "edge_router/ledger/sqlite_store.py": "edge_router/ledger/test_store edge_router/ledger/test_ledger "
    "edge_router/ledger/test_site_usage",
    "edge_router/ledger/store.py": "edge_router/ledger/test_ledger",
    "edge_router/policy/cost.py": "edge_router/test_policy edge_router/test_policy_properties",
    "edge_router/probed_state.py": "edge_router/test_backend edge_router/test_operation",
    "edge_router/proxied.py": "edge_router/test_retry_budget edge_router/test_pace edge_router/test_journal",
    "edge_router/proxy.py": "edge_router/test_usage edge_router/test_retries edge_router/test_continuation edge_router/test_limits "
    "edge_router/test_durable edge_router/test_tracing edge_router/test_objectives edge_router/test_functions "
    "edge_router/test_losses",
    "edge_router/quotas/daily.py": "edge_router/quotas/test_shared edge_router/ledger/test_accounting",
    "edge_router/quotas/lease_store.py": "edge_router/quotas/test_shared",
    "edge_router/quotas/shared.py": "edge_router/quotas/test_postgres_leases",
    "edge_router/relay.py": "edge_router/test_continuation edge_router/test_functions edge_router/test_upstream",
    "edge_router/router.py": "edge_router/test_serve edge_router/test_durable edge_router/test_journal edge_router/test_usage "
    "edge_router/test_tracing edge_router/test_operation",
    "edge_router/routes.py": "edge_router/test_operation edge_router/test_serve edge_router/test_scopes edge_router/test_objectives",
    "edge_router/selection.py": "edge_router/test_pace edge_router/test_choice edge_router/test_retries edge_router/test_session",
    "engine/drafting/acceptance.py": "engine/drafting/test_speculator",
    "engine/drafting/budget.py": "engine/drafting/test_speculator",
    "engine/drafting/costs.py": "engine/drafting/test_speculator",
    "engine/drafting/gain.py": "engine/drafting/test_speculator",
    "engine/drafting/model.py": "engine/test_draft_models engine/test_speculation",
    "engine/drafting/ngram_index.py": "engine/drafting/test_suffix",
    "engine/engine.py": "engine/test_overlap engine/test_parallel_samples engine/test_bootstrapped_host engine/test_tier_schedules",
    "engine/in_flight.py": "engine/test_engine engine/test_overlap engine/test_drafts engine/test_invariance",
    "engine/kv/block_mover.py": "engine/kv/test_tiered_cache",
    "engine/kv/block_parts.py": "engine/parallel/test_unequal_degrees",
    "engine/kv/cached_prefix.py": "engine/kv/test_groups engine/test_schedules engine/test_tier_schedules engine/kv/test_tiered_cache",
    "engine/kv/connector.py": "engine/kv/test_tiered_cache engine/test_tier_schedules",
    "engine/kv/groups.py": "engine/test_schedules",
    "engine/kv/host_thread.py": "engine/kv/test_tiered_cache",
    "engine/kv/host_tier.py": "engine/kv/test_tiered_cache",
    "engine/kv/lease.py": "engine/test_slab_allocator engine/test_two_models engine/test_shared_schedules",
    "engine/kv/manager.py": "engine/test_schedules engine/test_generations engine/test_tier_schedules",
    "engine/kv/peers/block_server.py": "engine/kv/peers/test_peers",
    "engine/kv/peers/peer_thread.py": "engine/kv/peers/test_peers",
    "engine/kv/place.py": "engine/test_tier_restarts",
    "engine/kv/prefix_index.py": "engine/test_block_pool",
    "engine/kv/segment_file.py": "engine/kv/test_disk_tier",
    "engine/kv/shared_tiers.py": "engine/test_tier_restarts engine/test_hand_over",
    "engine/kv/slab_map.py": "engine/test_slab_allocator engine/test_two_models engine/test_shared_schedules",
    "engine/kv/slab_policy.py": "engine/test_slab_allocator engine/test_two_models engine/test_shared_schedules",
    "engine/kv/slot_file.py": "engine/kv/test_host_tier",
    "engine/kv/tiered_cache.py": "engine/kv/test_store_thread engine/kv/test_tier_read engine/kv/test_error_backoff",
    "engine/parallel/balancer.py": "engine/parallel/test_dispatch",
    "engine/preemption.py": "engine/test_engine engine/test_schedules engine/test_shared_schedules engine/test_tier_schedules",
    "engine/publishing.py": "engine/test_engine engine/test_overlap engine/test_drafts engine/test_constrained_answers",
    "engine/scheduler.py": "engine/test_engine engine/test_schedules engine/test_generations engine/test_overlap "
    "engine/kv/test_tiered_cache engine/test_tier_schedules",
    "engine/step.py": "engine/test_batch engine/test_engine engine/test_preparation engine/test_schedules",
    "engine/token_counts.py": "engine/test_penalties",
    "engine/validation.py": "engine/test_engine",
    "kernels/lossless.py": "kernels/test_spoilt_calls",
    "kernels/lossless_speed.py": "engine/test_lossless_weights",
    "kernels/sampling_batch.py": "kernels/test_sample",
    "runtime/engines/assignments.py": "runtime/test_dispatch",
    "runtime/engines/device_budget.py": "runtime/test_waking",
    "runtime/engines/dispatch.py": "runtime/test_hand_over runtime/test_lenders",
    "runtime/engines/lending.py": "runtime/test_hand_over",
    "runtime/engines/wakes.py": "runtime/test_engines runtime/test_waking runtime/test_replicas",
    "runtime/functions/bindings/object_migrations.py": "runtime/functions/bindings/test_place wire/test_durable",
    "runtime/functions/bindings/r2_files.py": "runtime/functions/bindings/test_r2",
    "runtime/functions/bindings/r2_headers.py": "runtime/functions/bindings/test_r2_objects runtime/functions/bindings/test_r2",
    "runtime/functions/bindings/sql.py": "runtime/functions/bindings/test_d1",
    "runtime/functions/host/confinement.py": "runtime/functions/host/test_isolation",
    "runtime/functions/host/egress.py": "runtime/functions/host/test_hostile runtime/functions/host/test_isolates",
    "runtime/functions/host/isolate_factory.py": "runtime/functions/host/test_isolates runtime/functions/host/test_pool",
    "runtime/functions/host/isolate_handle.py": "runtime/functions/sdk/test_websockets runtime/functions/host/test_isolates "
    "runtime/functions/host/test_hostile",
    "runtime/functions/host/isolate_process.py": "runtime/functions/host/test_isolate_handle",
    "runtime/functions/host/isolate_set.py": "runtime/functions/host/test_pool runtime/functions/host/test_isolates "
    "runtime/functions/host/test_priority",
    "runtime/functions/host/isolate_watch.py": "runtime/functions/host/test_isolate_handle runtime/functions/host/test_hostile",
    "runtime/functions/host/isolate_work.py": "runtime/functions/host/test_isolate_handle runtime/functions/sdk/test_websockets "
    "runtime/functions/host/test_limits",
    "runtime/functions/host/limits.py": "runtime/functions/host/test_isolate_handle runtime/functions/host/test_hostile",
    "runtime/functions/host/oci.py": "runtime/functions/host/test_containers",
    "runtime/functions/host/pool.py": "runtime/functions/host/test_isolates runtime/functions/host/test_priority "
    "runtime/functions/host/test_pool_choice",
    "runtime/functions/host/site.py": "runtime/functions/host/test_live_version runtime/functions/host/test_isolates "
    "runtime/functions/host/test_isolation",
    "runtime/functions/host/site_zygote.py": "runtime/functions/host/test_interpreters",
    "runtime/functions/host/subrequests.py": "runtime/functions/host/test_hostile",
    "runtime/functions/host/waiters.py": "runtime/functions/host/test_pool runtime/functions/host/test_isolates",
    "runtime/generation.py": "runtime/test_openai runtime/test_choices runtime/test_admission",
    "runtime/router_context.py": "runtime/test_identity runtime/test_resumption runtime/test_queue_wait",
    "runtime/routes/lending.py": "runtime/test_lenders",
    "sites/accounts.py": "sites/test_agreement sites/test_config wire/test_credentials",
    "wire/deployments.py": "edge_router/test_deployments",
    "wire/errors.py": "runtime/test_anthropic",
    "wire/http/connection.py": "wire/http/test_websocket wire/http/test_server",
    "wire/http/exchange.py": "wire/http/test_server wire/http/test_framing",
    "wire/http/request.py": "wire/http/test_server",
    "wire/meters.py": "edge_router/ledger/test_ledger",
}  # fmt: skip


def mirrors(file: str) -> tuple[str, ...]:
    path = PurePosixPath(file)
    folders = [folder for folder in path.parents if folder.name]
    own = [name for folder in folders if (ROOT / (name := f"tests/{folder}/test_{path.stem}.py")).is_file()]
    further = [f"tests/{name}.py" for name in _FURTHER_TESTS.get(file, "").split()]
    return (*own[:1], *(name for name in further if (ROOT / name).is_file()))
