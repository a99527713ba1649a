"""A site's metrics: their names, types and labels are an interface for dashboards."""

from prometheus_client.parser import text_string_to_metric_families

from pilotlight.engine.api.protocol import DraftCounts, ModelLoad, StepOutput, TokenOutput
from pilotlight.runtime.hosts.fleet import HostLoad
from pilotlight.runtime.models.wake_history import Wake
from pilotlight.runtime.telemetry.metrics import Metrics
from pilotlight.wire.chat import Usage
from pilotlight.wire.hop.status import ModelStatus

OBSERVED = {  # each has a second metric with its start: NAME_created
    "vllm:time_to_first_token_seconds": ("histogram", {"model_name"}),
    "vllm:inter_token_latency_seconds": ("histogram", {"model_name"}),
    "vllm:e2e_request_latency_seconds": ("histogram", {"model_name"}),
    "vllm:prompt_tokens": ("counter", {"model_name"}),
    "vllm:generation_tokens": ("counter", {"model_name"}),
    "pilotlight_cached_prompt_tokens": ("counter", {"model_name"}),
    "pilotlight_requests": ("counter", {"model_name", "outcome"}),
    "pilotlight_cut_sequences": ("counter", {"model_name", "outcome"}),
    "pilotlight_http_responses": ("counter", {"endpoint", "status"}),
    "pilotlight_engine_step_host_ms": ("histogram", set()),
    "pilotlight_engine_step_phase_ms": ("histogram", {"phase"}),
    "pilotlight_engine_step_device_ms": ("histogram", set()),
    "pilotlight_wake_ms": ("histogram", {"clock", "model_name"}),
    "pilotlight_wake_phase_ms": ("histogram", {"clock", "phase"}),
    "pilotlight_evictions": ("counter", {"model_name", "to"}),
    "pilotlight_prompts_placed": ("counter", {"model_name", "where"}),
    "pilotlight_scalings": ("counter", {"direction", "model_name"}),
}
READ = {
    "pilotlight_site_info": ("gauge", {"site"}),
    "vllm:num_requests_running": ("gauge", {"engine", "model_name"}),
    "vllm:num_requests_waiting": ("gauge", {"engine", "model_name"}),
    "vllm:kv_cache_usage_perc": ("gauge", {"engine", "model_name"}),
    "vllm:prefix_cache_queries": ("counter", {"engine", "model_name"}),
    "vllm:prefix_cache_hits": ("counter", {"engine", "model_name"}),
    "pilotlight_kv_host_tier_hits": ("counter", {"engine", "model_name"}),
    "pilotlight_kv_disk_tier_hits": ("counter", {"engine", "model_name"}),
    "pilotlight_kv_store_hits": ("counter", {"engine", "model_name"}),
    "pilotlight_kv_peer_hits": ("counter", {"engine", "model_name"}),
    "pilotlight_kv_tier_losses": ("counter", {"engine", "model_name"}),
    "pilotlight_kv_corrupt_blocks": ("counter", {"engine", "model_name", "tier"}),
    "pilotlight_kv_pinned_blocks": ("gauge", {"engine", "model_name"}),
    "pilotlight_adapter_loads": ("counter", {"engine", "model_name"}),
    "pilotlight_image_encodes": ("counter", {"engine", "model_name"}),
    "pilotlight_image_hits": ("counter", {"engine", "model_name"}),
    "vllm:num_preemptions": ("counter", {"engine", "model_name"}),
    "vllm:spec_decode_num_drafts": ("counter", {"engine", "model_name"}),
    "vllm:spec_decode_num_draft_tokens": ("counter", {"engine", "model_name"}),
    "vllm:spec_decode_num_accepted_tokens": ("counter", {"engine", "model_name"}),
    "vllm:spec_decode_num_accepted_tokens_per_pos": ("counter", {"engine", "model_name", "position"}),
    "pilotlight_drafter_failures": ("counter", {"engine", "model_name"}),
    "pilotlight_recorded_steps": ("gauge", {"engine", "model_name"}),
    "pilotlight_recording_failures": ("counter", {"engine", "model_name"}),
    "pilotlight_swaps": ("counter", {"engine", "model_name"}),
    "pilotlight_model_residency": ("gauge", {"model_name", "residency"}),
    "pilotlight_model_copies": ("gauge", {"model_name"}),
    "pilotlight_inflight_requests": ("gauge", set()),
}


class Answer:
    delivered_tokens = 1
    finish_reason = "stop"
    usage = Usage.of(5, 3, 2)


def observed(model: str = "tiny") -> Metrics:
    metrics = Metrics("ams1")
    metrics.watch(
        lambda: [HostLoad(0, model, ModelLoad(running=2, prefix_hits=7, drafts=DraftCounts(2, 5, 3, (2, 1, 0), 1)))],
        {"inflight_requests": ("Requests in progress", lambda: 3)},
        lambda: [ModelStatus(model, "device", copies=1)],
    )
    metrics.response("models", 200)
    with metrics.requests.measure(model) as measure:
        measure.answer = Answer()
        measure.note_delta(0)
        measure.note_delta(0)
    engines = metrics.engines
    engines.step(StepOutput(1, (TokenOutput("s", (1,)),), {}, host_time_ms=0.3))
    engines.wake(Wake(model, "disk", 7.0, (("read", 0.004),)))
    engines.cut(model, "continued")
    engines.evicted(model, "host")
    engines.scaled(model, "up")
    engines.placed(model, "here")
    return metrics


def test_a_scrape_has_the_names_types_and_labels_that_were_promised() -> None:
    found = {
        family.name: (family.type, {label for sample in family.samples for label in sample.labels} - {"le"})
        for family in text_string_to_metric_families(observed().text().decode())
    }
    created = {f"{name}_created": ("gauge", labels) for name, (_, labels) in OBSERVED.items()}
    assert found == OBSERVED | created | READ


def test_gpus_are_reported_if_there_are_any() -> None:
    states: list[dict[str, float]] = [{"power_watts": 612.5, "slowed_by_power_cap": 1.0}, {"power_watts": 90.0}]
    watched = Metrics("ams1", lambda: states)
    watched.watch(lambda: [], {}, lambda: [])
    text = watched.text().decode()
    assert 'pilotlight_gpu_power_watts{gpu="0"} 612.5' in text
    assert 'pilotlight_gpu_power_watts{gpu="1"} 90.0' in text
    assert 'pilotlight_gpu_slowed_by_power_cap{gpu="0"} 1.0' in text
    assert 'slowed_by_power_cap{gpu="1"}' not in text


def test_what_was_observed_is_read_back_from_the_text() -> None:
    name = 'a "quoted" one\\of\ntwo lines'
    samples = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(observed(name).text().decode())
        for sample in family.samples
    }
    assert samples["pilotlight_requests_total", *sorted((name, "stop"))] == 1
    assert samples["vllm:generation_tokens_total", name] == 2  # another site generated one of the three
    assert samples["vllm:time_to_first_token_seconds_count", name] == 1
    assert samples["vllm:inter_token_latency_seconds_count", name] == 1
    assert samples["pilotlight_wake_ms_bucket", *sorted((name, "disk", "5.0"))] == 0
    assert samples["pilotlight_wake_ms_bucket", *sorted((name, "disk", "10.0"))] == 1
    assert samples["vllm:num_requests_running", *sorted((name, "0"))] == 2
    assert samples["vllm:prefix_cache_hits_total", *sorted((name, "0"))] == 7
    assert samples["pilotlight_model_residency", *sorted((name, "device"))] == 1
    assert samples["pilotlight_model_residency", *sorted((name, "disk"))] == 0
    assert samples["pilotlight_inflight_requests",] == 3


def test_steps_without_tokens_are_not_counted() -> None:
    metrics = observed()
    before = metrics.text()
    metrics.engines.step(StepOutput(2, (), {}, host_time_ms=100.0))
    assert metrics.text() == before
