"""Finish a request with tracing on and statistics off, as ``--otlp-traces-endpoint --disable-log-stats`` do."""

from typing import Any

from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor


def reproduce() -> dict[str, Any]:
    processor = OutputProcessor(None, log_stats=False, tracing_enabled=True)
    sampling = SamplingParams(max_tokens=1, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)
    request = EngineCoreRequest("a", [1, 2, 3], None, sampling, None, 0.0, None, None, None, external_req_id="a")
    processor.add_request(request, prompt=None)
    try:
        processor.process_outputs([EngineCoreOutput("a", [4], finish_reason=FinishReason.LENGTH)], 0.0, None)
    except AssertionError:
        return {"at the end of a request": "AssertionError"}
    return {}


if __name__ == "__main__":
    print(reproduce())
