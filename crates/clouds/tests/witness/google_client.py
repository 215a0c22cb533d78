"""Google's API client reads our fake of Google Cloud and sends our requests itself.

Reads from stdin the URL of the fake, our mask of fields and our body for the log. Writes what it read. A
response or a request with a field or a word that is not in Google's discovery documents ends it.
"""

import json
import re

from google.auth.compute_engine import Credentials
from google.auth.transport.requests import Request
from googleapiclient import discovery, discovery_cache

TYPES = {"string": str, "boolean": bool, "integer": int, "number": (int, float)}


def schemas(name):
    return json.loads(discovery_cache.get_static_doc(*name.split(".")))["schemas"]


def check(known, schema, value, place):
    """Compares a value with its schema."""
    schema = known[schema["$ref"]] if "$ref" in schema else schema
    kind = schema["type"]
    if kind == "object":
        for name, inner in value.items():
            own = schema.get("properties", {}).get(name) or schema.get("additionalProperties")
            assert own, f"{place} has no {name}"
            check(known, own, inner, f"{place}.{name}")
    elif kind == "array":
        for inner in value:
            check(known, schema["items"], inner, place)
    elif kind != "any":
        assert isinstance(value, TYPES[kind]), f"{place} is {value!r}"
        assert "int64" not in schema.get("format", "") or value.isdigit(), f"{place} is {value!r}"
        words = schema.get("enum", [value])
        assert value in words, f"{place} is {value!r}, not one of {words}"


def paths(tokens, start=()):
    """Returns the paths of a mask such as `a(b,c/d),e`."""
    found, path = [], start
    for token in tokens:
        if token == "(":
            found, path = found + paths(tokens, path), start
        elif token in ",)":
            found, path = found + [path], start
            if token == ")":
                break
        elif token != "/":
            path += (token,)
    return [one for one in found + [path] if one != start]


def check_mask(known, schema, mask):
    for path in paths(iter(re.findall(r"[()/,]|[^()/,]+", mask))):
        of = schema
        for name in path:
            of = known[of["$ref"]] if "$ref" in of else of
            of = known[of["items"]["$ref"]] if of["type"] == "array" else of
            own = of["additionalProperties"] if name == "*" else of["properties"].get(name)
            assert own, f"{path}: there is no {name}"
            of = own


def service(name, path):
    options = {"api_endpoint": asked["url"] + path}
    return discovery.build(*name.split("."), credentials=key, client_options=options)


def all_pages(resource, method, **arguments):
    call = getattr(resource, method)(**arguments)
    while call is not None:
        page = call.execute()
        yield page
        call = getattr(resource, f"{method}_next")(call, page)


def notice(number, link, upcoming):
    """Returns what both clients have of a notice."""
    names, window = link.split("/"), ("windowStartTime", "windowEndTime")
    start, end = (upcoming.get(name) for name in window)
    word = upcoming["maintenanceStatus"]
    return {"number": number, "name": names[-1], "word": word, "start": start, "end": end}


asked = json.loads(input())
key = Credentials()
key.refresh(Request())
compute, logging, audit = map(schemas, ("compute.v1", "logging.v2", "servicecontrol.v1"))
told = []

page_of_list = {"$ref": "InstanceAggregatedList"}
check_mask(compute, page_of_list, asked["fields"])
instances = service("compute.v1", "/compute/v1/").instances()
for page in all_pages(
    instances, "aggregatedList", project="p", maxResults=500, fields=asked["fields"]
):
    check(compute, page_of_list, page, "list")
    for zone in page.get("items", {}).values():
        for one in zone.get("instances", []):
            upcoming = one["resourceStatus"]["upcomingMaintenance"]
            told.append(notice(one["id"], one["selfLink"], upcoming))

check(logging, {"$ref": "ListLogEntriesRequest"}, asked["body"], "request")
for page in all_pages(service("logging.v2", "/").entries(), "list", body=asked["body"]):
    check(logging, {"$ref": "ListLogEntriesResponse"}, page, "log")
    for one in page.get("entries", []):
        payload = one["protoPayload"]
        assert payload.pop("@type") == "type.googleapis.com/google.cloud.audit.AuditLog"
        check(audit, {"$ref": "AuditLog"}, payload, "payload")
        number = one["resource"]["labels"]["instance_id"]
        told.append(notice(number, payload["resourceName"], payload["metadata"]))

print(json.dumps(told))
