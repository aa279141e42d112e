"""Mocks of services, made from the types that a Runtime annotates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, get_origin
from unittest.mock import MagicMock

from runtime_di import fields, hints
from runtime_di.declarations import names_of
from runtime_di.errors import OverrideError, Problem
from runtime_di.runtime import Runtime


def autospec(create: Callable[..., Any], runtime: type[Runtime], service: Any, attributes: dict[str, Any]) -> Any:
    """A mock with the interface of a service's annotated type, and no more.

    Attributes that only instances have are there if they are fields of a dataclass, or annotated in the class.

    Args:
        create: ``create_autospec`` of unittest.mock, or of pytest-mock's ``mocker``.
        runtime: a Runtime class.
        service: name, or container attribute.
        attributes: values of attributes, and ``**{"encode.return_value": [1]}`` for what methods return.

    Raises:
        OverrideError: the runtime has no such service, or its annotation is no class that could be imitated.
    """
    plan = runtime.plan()
    name = names_of(plan.container).get(id(service), str(service))
    if name not in plan.services:
        fix = f"fake one of {', '.join(plan.services)}"
        raise OverrideError("There is nothing to fake.", [Problem(name, f"no service of {runtime.__name__}", fix=fix)])
    annotation, module = runtime.service_annotations().get(name, (Any, ""))
    spec = _class(hints.resolve(annotation, module)) or _class(hints.resolve_importing(annotation, module))
    if spec is None:
        what, fix = f"its annotation {annotation} in {runtime.__name__} is no class", "write a fake by hand"
        raise OverrideError("The service cannot be imitated.", [Problem(name, what, fix=fix)])
    mock = create(spec, instance=True)
    for name, value in _instance_attributes(create, spec):
        setattr(mock, name, value)
    mock.configure_mock(**attributes)  # afterwards: create would put its own methods over them
    return mock


def _class(annotation: Any) -> type | None:
    """The one class that an annotation allows besides ``None``."""
    found = [get_origin(member) or member for member in fields.alternatives(annotation)]
    classes = [member for member in found if isinstance(member, type) and member is not type(None)]
    return classes[0] if len(classes) == 1 and len(found) <= 2 and classes[0] is not object else None  # noqa: PLR2004


def _instance_attributes(create: Callable[..., Any], spec: type) -> Iterator[tuple[str, Any]]:
    """A mock of each public attribute that the class annotates and does not have itself, as by its annotation."""
    for name, found in hints.annotations_of(spec).items():
        if not name.startswith("_") and not hasattr(spec, name):
            kind = _class(hints.resolve(*found))
            yield name, create(kind, instance=True) if kind else MagicMock()
