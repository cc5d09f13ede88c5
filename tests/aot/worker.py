"""Compiles jobs, one JSON line each, and answers each with one line; a compiler may kill it."""

import json
import sys
import traceback

from tests.aot.jobs import Job, compile_job


def main() -> None:
    """Read, compile, answer, until the input ends."""
    answers = sys.stdout
    # a compiler that prints must not disturb the answers
    sys.stdout = sys.stderr
    for line in sys.stdin:
        try:
            answer = {"facts": compile_job(Job(**json.loads(line)))}
        # whatever a compiler raises is a result here, not a failure of the worker
        except Exception as error:
            answer = {"error": traceback.format_exception_only(error)[-1].strip()[:2000]}
        print(json.dumps(answer), file=answers, flush=True)
