"""The documents say what the code does: the example runs as it stands, the commands exist."""

import re

import pytest

from bench.readme_tables import README
from trinfer.__main__ import main


@pytest.mark.slow
def test_python_example_runs_as_it_stands(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    exec(compile(example, str(README), "exec"), {})
    printed = capsys.readouterr().out
    assert "Bread rises because" in printed
    assert "LlamaMLP" in printed


@pytest.mark.parametrize("command", sorted(set(re.findall(r"bin/trinfer (\w+)", README.read_text()))))
def test_command_of_the_readme_exists(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    assert stopped.value.code == 0
    assert f"trinfer {command}" in capsys.readouterr().out
