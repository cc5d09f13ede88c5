"""Which models each public fault report names, and which of those wait for a row in ARCHITECTURES.

A report's tests run on all its models that have a row. The others stand here as pending; when their row
arrives, `test_report_table_is_up_to_date` asks for them to be moved, so none is left out without a word.
"""

from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class Report:
    """Models of the zoo that a report names and that can run now, and those that cannot yet."""

    models: tuple[str, ...]
    pending: tuple[str, ...] = ()


REPORTS = {
    "U001": Report(("llama", "bert", "gpt2")),
    "U002": Report(("llama", "gptj")),
    "U004": Report(("opt",)),
    "U005": Report(("llama",)),
    "U009": Report(("llama",)),
    "U011": Report(("mistral_sw",)),
    "U012": Report(("gptneo",)),
    "U014": Report(("gemma2",)),
    "U016": Report(("llama80", "phi")),
    "U022": Report(("llama", "opt", "opt_pre")),
    "U024": Report(("llama", "gptj")),
    "U027": Report(("bloom", "mpt")),
    "U029": Report(("llama", "gemma2")),
    "U033": Report(("llama",)),
    "U034": Report(("llama",)),
    "U035": Report(("llama",)),
    "U037": Report(("llama", "gptneo")),
    "U045": Report(("roberta", "gptj", "opt")),
    "U067": Report(("llama",)),
    "U070": Report(("llama",)),
    "U084": Report(("gptneo", "gemma2")),
}


def models(number: str) -> pytest.MarkDecorator:
    """Run a test on the models of a report."""
    return pytest.mark.parametrize("name", REPORTS[number].models)
