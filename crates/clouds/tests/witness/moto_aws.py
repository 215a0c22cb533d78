"""moto, an AWS that others wrote, with its check of signatures and permissions.

moto has no scheduled events, and its DescribeInstanceStatus no pages: both are added here, while moto takes the
requests and writes the responses by AWS's own model. Writes its URL and the role to be assumed once it is up;
ends with its stdin.
"""

import datetime
import json
import logging
import sys
import urllib.request

import boto3
from moto.core.authorization import ActionAuthenticatorMixin
from moto.core.responses import ActionResult
from moto.ec2.models import ec2_backends
from moto.ec2.responses.instances import InstanceResponse
from moto.server import ThreadedMotoServer
from moto.sts.models import sts_backends

REGION, ACCOUNT, PAGE = "eu-west-1", "123456789012", 2
ROLES = {"reader": "ec2:DescribeInstanceStatus", "other": "ec2:DescribeVolumes"}


def describe_instance_status(self):
    """Returns a page of at most two instances with an event of a code that is asked for."""
    codes = self._filters_from_querystring()["event.code"]
    assert self._get_bool_param("IncludeAllInstances") and self._get_param("MaxResults") == 1000
    reservations = ec2_backends[ACCOUNT][REGION].reservations.values()
    instances = [one for reservation in reservations for one in reservation.instances]
    instances = [one for one in instances if one.events[0]["Code"] in codes]
    start = int(self._get_param("NextToken") or 0)
    page = {"InstanceStatuses": instances[start : start + PAGE]}
    if start + PAGE < len(instances):
        page["NextToken"] = str(start + PAGE)
    return ActionResult(page)


def check_unless_unsigned(self, *arguments):
    """Checks a request, but for the one that AWS takes unsigned: a web identity is its credential."""
    if self._get_action() != "AssumeRoleWithWebIdentity":
        check(self, *arguments)


check = ActionAuthenticatorMixin._authenticate_and_authorize_action
ActionAuthenticatorMixin._authenticate_and_authorize_action = check_unless_unsigned
InstanceResponse.describe_instance_status = describe_instance_status

logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
url = "http://{}:{}".format(*server.get_host_and_port())
keys = {"aws_access_key_id": "k", "aws_secret_access_key": "s", "region_name": REGION}
iam, ec2, sts = (boto3.client(name, endpoint_url=url, **keys) for name in ("iam", "ec2", "sts"))

roles = []
for name, action in ROLES.items():
    role = iam.create_role(RoleName=name, AssumeRolePolicyDocument="{}")
    roles.append(role["Role"]["Arn"])
    statement = {"Effect": "Allow", "Action": action, "Resource": "*"}
    policy = json.dumps({"Version": "2012-10-17", "Statement": [statement]})
    iam.put_role_policy(RoleName=name, PolicyName="p", PolicyDocument=policy)

image = ec2.describe_images()["Images"][0]["ImageId"]
ec2.run_instances(ImageId=image, MinCount=5, MaxCount=5)
begin = datetime.datetime(2027, 1, 15, 9, tzinfo=datetime.timezone.utc)
codes = ec2.meta.service_model.shape_for("EventCode").enum
reservations = ec2_backends[ACCOUNT][REGION].reservations.values()
instances = [one for reservation in reservations for one in reservation.instances]
for number, (instance, code) in enumerate(zip(instances, codes)):
    instance.events = [
        {
            "InstanceEventId": f"instance-event-{number}",
            "Code": code,
            "Description": "a <reboot> & more",
            "NotBefore": begin,
            "NotAfter": begin + datetime.timedelta(hours=2),
        }
    ]

# The keys of moto's metadata service belong to no role: they get the first one.
sts.assume_role(RoleArn=roles[0], RoleSessionName="imds")
role = sts_backends[ACCOUNT]["aws"].assumed_roles[0]
role.access_key_id, role.secret_access_key = "test-key", "test-secret-key"
role.session_token = "test-session-token"

# From here on every request is checked.
plain = {"content-type": "text/plain"}
urllib.request.urlopen(urllib.request.Request(f"{url}/moto-api/reset-auth", b"0", plain)).close()
told = {"url": url, "roles": roles, "instances": [one.id for one in instances]}
print(json.dumps({**told, "codes": codes}), flush=True)
sys.stdin.read()
