"""boto3, which knows AWS's own models, reads our fake of AWS and sends our requests itself.

Reads from stdin the URL of the fake and our calls of AWS Health. Writes what it read. A response with a member
or a word that AWS's model does not have ends it.
"""

import json
from xml.etree import ElementTree

import boto3
from botocore import xform_name
from botocore.config import Config
from botocore.exceptions import ClientError

TYPES = {"string": str, "timestamp": (int, float), "integer": int, "boolean": bool}


def check(shape, value, place):
    """Compares a value of JSON with its model."""
    if shape.type_name == "structure":
        for name, inner in value.items():
            assert name in shape.members, f"{place} has no {name}"
            check(shape.members[name], inner, f"{place}.{name}")
    elif shape.type_name == "list":
        for inner in value:
            check(shape.member, inner, place)
    else:
        assert isinstance(value, TYPES[shape.type_name]), f"{place} is {value!r}"
        check_word(shape, value, place)


def check_xml(shape, element, place):
    """Compares an element of XML with its model."""
    if shape.type_name == "structure":
        members = shape.members.items()
        names = {member.serialization.get("name", name): member for name, member in members}
        for inner in element:
            name = inner.tag.rpartition("}")[2]
            assert name in names or name == "requestId", f"{place} has no {name}"
            if name in names:
                check_xml(names[name], inner, f"{place}.{name}")
    elif shape.type_name == "list":
        for inner in element:
            assert inner.tag.rpartition("}")[2] == shape.member.serialization["name"], place
            check_xml(shape.member, inner, place)
    else:
        check_word(shape, element.text, place)


def check_word(shape, value, place):
    words = getattr(shape, "enum", None)
    assert not words or value in words, f"{place} is {value!r}, not one of {words}"


def check_response(operation_model, response_dict, **_):
    if response_dict["status_code"] == 200:
        shape, body = operation_model.output_shape, response_dict["body"]
        if body.startswith(b"<"):
            check_xml(shape, ElementTree.fromstring(body), operation_model.name)
        else:
            check(shape, json.loads(body), operation_model.name)


def client(name, region):
    config = Config(retries={"total_max_attempts": 1})
    made = boto3.client(name, region_name=region, endpoint_url=asked["url"], config=config)
    made.meta.events.register("before-parse", check_response)
    return made


def seconds(time):
    return int(time.timestamp()) if time else None


def pages(service, operation, **arguments):
    return service.get_paginator(operation).paginate(**arguments)


def notice(event, instance, word, of):
    """Returns what both clients have of a notice."""
    names = ("startTime", "endTime") if "startTime" in of else ("NotBefore", "NotAfter")
    start, end = (seconds(of.get(name)) for name in names)
    return {"event": event, "instance": instance, "word": word, "start": start, "end": end}


def read_health():
    """Reads all that our lists of events have, with each event's instances."""
    events = {}
    for operation, arguments in asked["calls"]:
        if operation == "DescribeEvents" and "nextToken" not in arguments:
            listed = pages(health, "describe_events", filter=arguments["filter"])
            events.update((event["arn"], event) for event in listed.search("events"))
    notices, texts, arns = [], set(), sorted(events)
    for batch in (arns[at : at + 10] for at in range(0, len(arns), 10)):
        details = health.describe_event_details(eventArns=batch)
        assert details["failedSet"] == [] and len(details["successfulSet"]) == len(batch)
        texts |= {one["eventDescription"]["latestDescription"] for one in details["successfulSet"]}
        entities = pages(health, "describe_affected_entities", filter={"eventArns": batch})
        for one in entities.search("entities"):
            event = events[one["eventArn"]]
            notices.append(notice(one["entityArn"], one["entityValue"], event["statusCode"], event))
    return {"notices": notices, "texts": sorted(texts)}


def read_ec2():
    """Asks for all codes of events that there are."""
    codes = ec2.meta.service_model.shape_for("EventCode").enum
    listed = pages(
        ec2,
        "describe_instance_status",
        Filters=[{"Name": "event.code", "Values": codes}],
        IncludeAllInstances=True,
        PaginationConfig={"PageSize": 1000},
    )
    return [
        notice(event["InstanceEventId"], one["InstanceId"], event["Description"], event)
        for one in listed.search("InstanceStatuses")
        for event in one.get("Events", [])
    ]


def refusal(call, **arguments):
    try:
        call(**arguments)
    except ClientError as error:
        return [error.response["Error"][name] for name in ("Code", "Message")]
    return None


asked = json.loads(input())
health, ec2 = client("health", "us-east-1"), client("ec2", "eu-west-1")
for operation, arguments in asked["calls"]:
    # boto3 refuses an argument that AWS's model does not have.
    getattr(health, xform_name(operation))(**arguments)
told = {"ec2": read_ec2(), "health": read_health()}
told["refusals"] = [
    refusal(health.describe_event_details, eventArns=["arn:aws:health:::event/refused"]),
    refusal(ec2.describe_instance_status, InstanceIds=["i-refused"]),
]
print(json.dumps(told))
