"""Valid and invalid requests, made by schemathesis from the server's schema."""

from dataclasses import dataclass
from typing import Any

import httpx

from sites import SECONDS


@dataclass
class Tally:
    cases: int = 0
    operations: int = 0
    statuses: dict[int, int] | None = None


def known_schema(url: str, models: list[str], inspected: str) -> dict[str, Any]:
    """The server's schema with real names and small numbers: else hardly a case would pass the first check."""
    schema = httpx.get(f"{url}/openapi.json", timeout=SECONDS).json()
    parts = schema["components"]["schemas"]
    for name in ("CompletionRequest", "ChatRequest"):
        fields = parts[name]["properties"]
        fields["model"]["enum"] = [*models, "none"]
        for field in {"max_tokens", "max_completion_tokens", "n"} & set(fields):
            fields[field] = {"type": "integer", "minimum": 1, "maximum": 3 if field == "n" else 8}
    for path, operations in schema["paths"].items():
        for operation in operations.values():
            for parameter in operation.get("parameters", []):
                known = {"request_id": [inspected, "none"], "model": models}.get(parameter["name"])
                if known and f"{{{parameter['name']}}}" in path:
                    parameter["schema"] = {"type": "string", "enum": known}
                elif parameter["schema"].get("type") == "integer":
                    parameter["schema"]["maximum"] = 8
    return schema


def fuzz(url: str, schema: dict[str, Any], cases: int, seed: int) -> Tally:
    """Send at least so many cases over all operations; three of four follow the schema."""
    import schemathesis  # here, for processes whose tests send none

    found = Tally(statuses={})
    operations = [result.ok() for result in schemathesis.openapi.from_dict(schema).get_all_operations()]
    found.operations = len(operations)
    while found.cases < cases:
        _send_cases(url, operations, cases - found.cases, seed, found)
        seed += 1
    return found


def _send_cases(url: str, operations: list[Any], cases: int, seed: int, found: Tally) -> None:
    import hypothesis
    from schemathesis import GenerationMode
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance, status_code_conformance

    checks = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
    weights = [6 if operation.method == "post" else 1 for operation in operations]
    for operation, weight in zip(operations, weights, strict=True):
        share = max(4, round(cases * weight / sum(weights)))
        for mode, size in ((GenerationMode.POSITIVE, share - share // 4), (GenerationMode.NEGATIVE, share // 4)):
            if mode is GenerationMode.NEGATIVE and not (operation.body or list(operation.iter_parameters())):
                continue

            @hypothesis.seed(seed)
            @hypothesis.settings(
                max_examples=size,
                deadline=None,
                database=None,
                derandomize=False,
                suppress_health_check=list(hypothesis.HealthCheck),
            )
            @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
            def send(case: Any) -> None:
                response = case.call(base_url=url, timeout=SECONDS)
                found.cases += 1
                found.statuses[response.status_code] = found.statuses.get(response.status_code, 0) + 1
                case.validate_response(response, checks=checks)

            send()
