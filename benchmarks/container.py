"""Cost of the container, as ratios within one run: warm reads, opening, and imports.

python benchmarks/container.py
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from timeit import Timer

from dependency_injector import containers, providers

from runtime_di import Phase, Runtime, RuntimeContainer, RuntimeSettings, service


class Thing:
    """A service without build cost."""


def chain(num_services: int) -> type[Runtime]:
    """A runtime of services that each depend on the previous one."""
    declared = {"first": service(Phase.RUNTIME, Thing)}
    for number in range(1, num_services):
        before = list(declared.values())[-1]
        declared[f"s{number}"] = service(Phase.RUNTIME, lambda _before: Thing(), before)
    container = type("Chain", (RuntimeContainer,), dict(declared))
    annotations = dict.fromkeys(declared, Thing) | {"settings": RuntimeSettings}
    return type("ChainRuntime", (Runtime,), {"__annotations__": annotations}, container=container)


def stock(num_services: int) -> type[containers.DeclarativeContainer]:
    """The same chain of dependency-injector's own Singletons."""
    declared = {"first": providers.Singleton(Thing)}
    for number in range(1, num_services):
        before = list(declared.values())[-1]
        declared[f"s{number}"] = providers.Singleton(lambda _before: Thing(), before)
    return type("Stock", (containers.DeclarativeContainer,), dict(declared))


def per_call_ns(call: Callable[[], object]) -> float:
    """Nanoseconds of one call, the median of nine rounds."""
    timer = Timer(call)
    number = max(1, timer.autorange()[0] // 10)
    return median(timer.repeat(9, number)) / number * 1e9


def seconds(call: Callable[[], object]) -> float:
    """Seconds of one call, the median of five."""
    taken = []
    for _ in range(5):
        started = time.perf_counter()
        call()
        taken.append(time.perf_counter() - started)
    return median(taken)


def warm_reads() -> None:
    """A warm service, compared with an attribute of a plain object and with the library's own Singleton."""
    plain, singleton = Thing(), providers.Singleton(Thing)
    plain.first = Thing()  # type: ignore[attr-defined]
    with chain(10).open() as runtime:
        runtime.start()
        names = {"plain": plain, "runtime": runtime, "container": runtime.container, "singleton": singleton}
        setup = {
            "attribute of a plain object": "plain.first",
            "runtime.first, warm": "runtime.first",
            "stock Singleton, warm": "singleton()",
            "runtime.container.first(), warm": "container.first()",
        }
        base = None
        print(f"{'warm read':<34}{'ns':>8}{'ratio':>8}")
        for name, code in setup.items():
            number = 200_000
            taken = median(Timer(code, globals=names).repeat(9, number)) / number * 1e9
            base = base or taken
            print(f"{name:<34}{taken:>8.1f}{taken / base:>8.2f}")


def openings() -> None:
    """Opening, starting and closing by number of services."""
    print(f"\n{'services':>8}{'open ms':>10}{'+start ms':>10}{'us/service':>12}{'library copy ms':>17}")
    for num_services in (10, 100, 1000):
        runtime, library = chain(num_services), stock(num_services)
        runtime.open().close()

        def whole(opened: type[Runtime] = runtime) -> None:
            with opened.open() as one:
                one.start()

        def alone(opened: type[Runtime] = runtime) -> None:
            opened.open().close()

        opened, started = seconds(alone), seconds(whole)
        copied = seconds(library)
        per_service = started / num_services * 1e6
        print(f"{num_services:>8}{opened * 1e3:>10.2f}{started * 1e3:>10.2f}{per_service:>12.1f}{copied * 1e3:>17.2f}")


def imports() -> None:
    """Importing the entrypoints, compared with importing their dependencies."""
    print(f"\n{'import':<50}{'s':>8}{'ratio':>8}")
    base = None
    for code in (
        "import pydantic_settings, dependency_injector.containers",
        "import runtime_di.containers",
        "import runtime_di.containers as c; c.TrainingRuntime.plan().check()",
        "import torch",
    ):
        taken = seconds(partial(subprocess.run, [sys.executable, "-c", code], check=True))
        base = base or taken
        print(f"{code:<66}{taken:>6.2f}{taken / base:>8.2f}"[:90])


if __name__ == "__main__":
    warm_reads()
    openings()
    imports()
