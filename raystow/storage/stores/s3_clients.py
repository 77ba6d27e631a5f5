"""The clients of one bucket, with all of their limits: boto3 for small requests, obstore for large ones.

Addresses, regions, credentials and certificates come from the usual AWS configuration (variables, profile, role), read by
botocore and passed to obstore, so that both use the same endpoint.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import gzip
import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import urlsplit

import boto3
import botocore.session
import msgspec
from botocore.awsrequest import AWSRequest
from botocore.client import BaseClient
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ConnectTimeoutError, ReadTimeoutError
from botocore.loaders import JSONFileLoader, Loader
from botocore.model import OperationModel
from obstore.auth.boto3 import Boto3CredentialProvider
from obstore.store import S3Store as ObstoreS3

from ..errors import StoreError
from ..runtime.clock import SYSTEM
from . import bounded_http
from .bucket import BucketClients
from .request_limits import ONCE, RequestLimits, of_process
from .s3_errors import boto_errors
from .s3_options import S3Options
from .settings import S3Overrides, StoreSettings, place_named

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig

# botocore renews credentials ten minutes before they end at the latest, so a copy of them is good for less than that.
_CREDENTIALS_LIVE = timedelta(minutes=9)
_BEGUN = "raystow-begun"  # in the context of a request
_AMAZON = ".amazonaws.com", ".amazonaws.com.cn"
_Request: TypeAlias = Mapping[str, Mapping[str, float]]  # of botocore
_FILES = "shared-credentials-file", "config-file"  # sources of keys, as botocore names them
_NOTHING = (None, None, os.devnull, None)
_UNSET = {"profile": (None, None, None, None), "config_file": _NOTHING, "credentials_file": _NOTHING}


@dataclass(frozen=True)
class S3Clients(BucketClients):
    """``decide``, for small requests, and ``swap`` are boto3 clients; the others, for large ones, are obstore's."""

    decide: Any


@dataclass(frozen=True)
class _Place:
    """The bucket's address, as the AWS configuration says."""

    bucket: str
    region: str | None
    endpoint: str
    virtual: bool
    checksums: bool
    certificates: str | None

    @property
    def plain(self) -> bool:
        return self.endpoint.startswith("http://")

    @property
    def namespace(self) -> str:
        """What buckets have their names in: a server, or all regions of a partition of AWS."""
        host = urlsplit(self.endpoint).hostname or ""
        return next((of for of in _AMAZON if host.endswith(of)), self.endpoint.rstrip("/").lower())


class S3Configuration:
    """How a bucket is reached: as the AWS configuration of this process says, or as a job's settings say. Nothing is sent yet,
    but a role's credentials may be fetched. Raises ``StoreError`` if there are none.

    Args:
        bucket: The bucket.
        settings: Those of a job; this process's variables, profiles and identity are then ignored.
        overrides: What replaces this process's configuration.
    """

    def __init__(
        self,
        bucket: str,
        *,
        settings: StoreSettings | None = None,
        overrides: S3Overrides = S3Overrides(),  # noqa: B008
    ) -> None:
        self._overrides = overrides
        with boto_errors("the set-up of the S3 client", f"s3://{bucket}"):
            self.session = session = _own_session(overrides) if settings is None else _session_of(settings)
            if (credentials := session.get_credentials()) is None:
                remedy = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or a role"
                raise StoreError("there are no AWS credentials", subject=f"s3://{bucket}", remedy=remedy)
            self._credentials = credentials
            self.options = S3Options.of_environment() if settings is None else S3Options.of_settings(settings)
            self.place = _place(session, bucket, overrides) if settings is None else _given_place(settings)

    def outdated(self, anew: bool) -> bool:
        """Whether a file has other keys by now than when it was read. ``anew``: also ask a service that provides keys."""
        if not anew and self._credentials.method not in _FILES:
            return False
        now = _own_session(self._overrides).get_credentials()
        return now is not None and now.get_frozen_credentials() != self._credentials.get_frozen_credentials()

    def settings(self) -> StoreSettings:
        """Return what another process needs, with credentials that are valid now."""
        with boto_errors("the set-up of the S3 client", f"s3://{self.place.bucket}"):
            client = {key: value for key, value in dataclasses.asdict(self.place).items() if value is not None}
            keys = self._credentials.get_frozen_credentials()
            expires = getattr(self._credentials, "_expiry_time", None)  # botocore shows it nowhere else
        named = {"access_key": keys.access_key, "secret_key": keys.secret_key, "token": keys.token}
        named["customer_key"] = self.options.customer_key
        return StoreSettings(
            place=place_named("s3", self.place.namespace),
            client={key: value if isinstance(value, str) else str(int(value)) for key, value in client.items()}
            | self.options.client(),
            credentials={name: value for name, value in named.items() if value},
            expires=expires.timestamp() if expires is not None else 0.0,
        )


def connect(configuration: S3Configuration, limits: RequestLimits) -> S3Clients:
    """Make the clients. Nothing is sent yet."""
    with boto_errors("the set-up of the S3 client", f"s3://{configuration.place.bucket}"):
        return S3Clients(
            decide=_boto_client(configuration, limits, limits.attempts),
            swap=_boto_client(configuration, limits, 1),
            endpoint=configuration.place.endpoint,
            send=_obstore_client(configuration, limits.upload_timeouts, ONCE),
            send_parts=_obstore_client(configuration, limits.upload_timeouts, limits.retries),
            fetch=_obstore_client(configuration, limits.read_timeouts, ONCE),
        )


def _own_session(overrides: S3Overrides) -> boto3.Session:
    core = botocore.session.get_session()
    core.register_component("data_loader", service_models(core.get_config_variable("data_path")))
    region = core.get_config_variable("region") or os.environ.get("AWS_REGION") or None
    return _with_keys(core, overrides.credentials, overrides.region or region)


def _session_of(settings: StoreSettings) -> boto3.Session:
    """A session that reads neither the variables nor the files of this process, which may be those of another job."""
    core = botocore.session.Session(session_vars=_UNSET)
    core.register_component("data_loader", service_models(None))
    return _with_keys(core, settings.credentials, settings.client.get("region"))


def _with_keys(core: botocore.session.Session, keys: Mapping[str, str], region: str | None) -> boto3.Session:
    """A session with these keys, or with what the configuration names if there are none. Requests for a role's credentials have
    the limits of this process."""
    limits = of_process()
    times = {"connect_timeout": limits.connect_seconds, "read_timeout": limits.stall_seconds}
    retries = {"mode": "standard", "total_max_attempts": min(limits.attempts, limits.silent_attempts)}
    core.set_default_client_config(Config(**times, retries=retries))
    return boto3.Session(
        aws_access_key_id=keys.get("access_key"),
        aws_secret_access_key=keys.get("secret_key"),
        aws_session_token=keys.get("token"),
        botocore_session=core,
        region_name=region,
    )


def _given_place(settings: StoreSettings) -> _Place:
    client = settings.client
    return _Place(
        bucket=client["bucket"],
        region=client.get("region"),
        endpoint=client["endpoint"],
        virtual=client["virtual"] == "1",
        checksums=client["checksums"] == "1",
        certificates=client.get("certificates"),
    )


class _ModelFiles(JSONFileLoader):  # type: ignore[misc]
    def load_file(self, file_path: str) -> Any:
        """As botocore's, with a faster parser."""
        for path, opener in ((f"{file_path}.json", open), (f"{file_path}.json.gz", gzip.open)):
            if os.path.isfile(path):
                with opener(path, "rb") as file:
                    return msgspec.json.decode(file.read())
        return None


class ServiceModels(Loader):  # type: ignore[misc]
    """Reads botocore's descriptions of services."""

    FILE_LOADER_CLASS = _ModelFiles

    def list_available_services(self, type_name: str) -> list[str]:
        """All services. botocore would look into the folder of each: 4,000 system calls to learn that there is S3."""
        return sorted({name for folder in self.search_paths if os.path.isdir(folder) for name in os.listdir(folder)})


@functools.cache
def service_models(folders: str | None) -> ServiceModels:
    """botocore's description of S3: three megabytes of JSON that each session would parse again."""
    given = folders.split(os.pathsep) if folders else []
    return ServiceModels([os.path.expanduser(os.path.expandvars(folder)) for folder in given])


def _place(session: boto3.Session, bucket: str, overrides: S3Overrides) -> _Place:
    core = session._session
    # A client is the only public way to learn what all the variables and profile sections about endpoints come to.
    endpoint = str(session.client("s3", endpoint_url=overrides.endpoint or None).meta.endpoint_url)
    style = (core.get_scoped_config().get("s3") or {}).get("addressing_style", "auto")
    # A dot in a bucket's name does not fit the certificate of a virtual host.
    amazon = (urlsplit(endpoint).hostname or "").endswith(_AMAZON) and "." not in bucket
    return _Place(
        bucket=bucket,
        region=session.region_name,
        endpoint=endpoint,
        virtual=overrides.virtual or style == "virtual" or (style == "auto" and amazon),
        checksums=core.get_config_variable("request_checksum_calculation") != "when_required",
        certificates=overrides.certificates or core.get_config_variable("ca_bundle") or os.environ.get("REQUESTS_CA_BUNDLE"),
    )


def _boto_client(configuration: S3Configuration, limits: RequestLimits, attempts: int) -> Any:
    session, place, more = configuration.session, configuration.place, configuration.options.boto_parameters()

    def add(params: Mapping[str, object], model: OperationModel, **_: object) -> dict[str, object]:
        return {**params, **{name: value for name, value in more.items() if name in model.input_shape.members}}

    # Over plain http boto3 would hash each body for the signature; its CRC covers the body there, as it does over https.
    signing: dict[str, object] = {"payload_signing_enabled": False} if place.plain else {}
    config = Config(
        connect_timeout=limits.connect_seconds,
        read_timeout=limits.stall_seconds,
        retries={"mode": "standard", "total_max_attempts": attempts},
        tcp_keepalive=True,
        max_pool_connections=limits.connections,
        s3={"addressing_style": "virtual" if place.virtual else "path", **signing},
        request_checksum_calculation="when_supported" if place.checksums else "when_required",
    )
    client = session.client("s3", config=config, endpoint_url=place.endpoint, verify=place.certificates)
    bounded_http.bound(client, limits.request_seconds)
    _end_in_silence(client, limits)
    client.meta.events.register("before-call.s3.DeleteObjects", _add_md5)
    if more:
        client.meta.events.register("provide-client-params.s3", add)
    return client


def _end_in_silence(client: BaseClient, limits: RequestLimits) -> None:
    """Let requests of a boto3 client end after ``silent_attempts`` without an answer. After other failures there are more."""

    def begin(request: AWSRequest, **_: object) -> None:
        request.context.setdefault(_BEGUN, SYSTEM.monotonic())

    def end(attempts: int, caught_exception: BotoCoreError | None, request_dict: _Request, **_: object) -> None:
        took = SYSTEM.monotonic() - request_dict["context"][_BEGUN]
        enough = attempts >= limits.silent_attempts and took >= limits.silent_seconds
        if enough and isinstance(caught_exception, ReadTimeoutError | ConnectTimeoutError):
            raise caught_exception  # what a handler raises, the caller of the client gets

    client.meta.events.register("request-created.s3", begin)
    client.meta.events.register("needs-retry.s3", end)


def _add_md5(params: Mapping[str, Any], **_: object) -> None:
    """Add the digest that some servers demand of this request alone, as AWS did; boto3 sends a CRC instead since 1.36."""
    digest = hashlib.md5(params["body"], usedforsecurity=False).digest()
    params["headers"]["Content-MD5"] = base64.b64encode(digest).decode()


def _obstore_client(configuration: S3Configuration, timeouts: ClientConfig, retries: RetryConfig) -> ObstoreS3:
    session, place = configuration.session, configuration.place
    host = place.endpoint.replace("://", f"://{place.bucket}.", 1) if place.virtual else place.endpoint
    config: dict[str, object] = {
        # Under both names: obstore would prefer the second from the environment to the first from here.
        "endpoint": host,
        "aws_endpoint_url_s3": host,
        "virtual_hosted_style_request": place.virtual,
        # https protects requests. Over plain http the signature includes a digest of the body, which every server
        # checks; of a checksum header alone Ceph 20 takes no notice (it wants one more header, which obstore cannot sign).
        "unsigned_payload": not (place.plain and place.checksums),
        "region": place.region or "us-east-1",
        **configuration.options.obstore_config(),
    }
    if place.checksums:
        config["checksum_algorithm"] = "CRC64NVME"
    options: ClientConfig = {**timeouts, "allow_http": place.plain}
    if place.certificates and not place.plain:
        options["root_certificate"] = _certificates(place)
    return ObstoreS3(
        place.bucket,
        config=config,  # type: ignore[arg-type]
        client_options=options,
        retry_config=retries,
        credential_provider=Boto3CredentialProvider(session, ttl=_CREDENTIALS_LIVE),
    )


def _certificates(place: _Place) -> bytes:
    path = place.certificates or ""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise StoreError("cannot read the certificates", subject=path, remedy="correct AWS_CA_BUNDLE") from error
