"""Renders a plan as text and as a Mermaid flow chart."""

from __future__ import annotations

from runtime_di.plan.graph import ServiceGraph


def as_text(graph: ServiceGraph) -> str:
    """A table of the order: phase, service, its dependencies, and the settings it reads."""
    lines = []
    for phase, names in graph.phases.items():
        lines += [phase.name] if names else []
        for name in names:
            spec = graph.services[name]
            needs = ", ".join((*spec.dependencies, *(f"settings.{path}" for path in spec.settings)))
            lines.append(f"  {name}" + (f" <- {needs}" if needs else ""))
    return "\n".join(lines)


def as_mermaid(graph: ServiceGraph) -> str:
    """A Mermaid flow chart, one box per phase."""
    lines = ["flowchart TD"]
    for phase, names in graph.phases.items():
        if names:
            lines += [f"  subgraph {phase.name}", *(f"    {name}" for name in names), "  end"]
    return "\n".join([*lines, *(f"  {needed} --> {name}" for name, needed in graph.edges)])
