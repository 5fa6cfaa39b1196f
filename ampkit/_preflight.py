"""PLACEHOLDER of the lead until the helper's file lands: overwrite it."""
from typing import Any


class Preflight:
    def __init__(self, device: Any, generators: Any = ()) -> None: self.findings: list[Any] = []
    def __enter__(self) -> "Preflight": return self
    def __exit__(self, *a: Any) -> None: pass
def describe(findings: Any) -> str: return ""
