"""Access control: Host and Origin, the token, hosts of new workers.

Changes need the token from everywhere. A foreign Host header is refused, and so is an Origin: a web page in a browser
can reach loopback by a DNS name that it controls, and must not be able to send requests. The token is compared in
constant time and is in no log and no response. Prompts are sent to workers, so workers are accepted only on hosts that
were named when the gateway was started.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import ipaddress
from collections.abc import Iterable
from urllib.parse import urlsplit

from trimtab.core.errors import InputError
from trimtab.runtime.gateway.exchange import Headers, Refusal, invalid_value
from trimtab.runtime.gateway.settings import LOOPBACK, GatewaySettings
from trimtab.runtime.http.listening import host_name

ANY = frozenset({"0.0.0.0", "::", ""})


class GatewayGuard:
    """Checks of one gateway."""

    def __init__(self, settings: GatewaySettings) -> None:
        self._token = settings.token.encode()
        self.anonymous = settings.allows_anonymous  # generations and queries need no token
        own = set() if settings.host in ANY else {settings.host.lower()}
        self._names = LOOPBACK | own | {name.lower() for name in settings.allowed_hosts}
        # The owner of a name can point it here (DNS rebinding); a numeric address is what the caller typed.
        self._takes_numbers = not settings.on_loopback
        self._places = AllowedHosts(settings.worker_hosts)
        self._accepted: set[bytes] = set()  # accepted Host headers; bounded

    def check_host(self, headers: Headers) -> None:
        """Checks that the Host is this gateway and that the caller is no page of another origin."""
        host = headers.get(b"host", b"")
        if host not in self._accepted:
            if not self._is_ours(host_name(host.decode("latin-1"))):
                raise Refusal(421, "this Host is not served here; add it to allowed_hosts", code="wrong_host")
            if len(self._accepted) < 64:
                self._accepted.add(host)
        origin = headers.get(b"origin")
        if origin is not None:
            self._check_origin(origin.decode("latin-1"))

    def _check_origin(self, origin: str) -> None:
        try:
            place = urlsplit(origin).netloc
        except ValueError:
            raise Refusal(400, "Origin: no address of a page", param="origin", code="invalid_header") from None
        if host_name(place) not in self._names:
            raise Refusal(403, "requests from pages of other origins are refused", code="wrong_origin")

    def _is_ours(self, name: str) -> bool:
        if name in self._names:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return self._takes_numbers

    def check_token(self, headers: Headers) -> None:
        """Token as bearer, or as the password of basic authentication (for .netrc)."""
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        given = given.strip()
        if scheme.lower() == b"basic":
            try:
                given = base64.b64decode(given, validate=True).partition(b":")[2]
            except binascii.Error:
                given = b""
        elif scheme.lower() != b"bearer":
            given = b""
        if not hmac.compare_digest(given, self._token):
            raise Refusal(
                401, "a token is needed: Authorization: Bearer TOKEN", code="wrong_token",
                headers={"www-authenticate": "Bearer"},
            )  # fmt: skip

    def check_worker(self, url: object) -> str:
        """URL of a new worker, if its host is allowed."""
        if not isinstance(url, str) or not url:
            raise invalid_value("url", "the address of the worker is missing")
        try:
            parts = urlsplit(url)
            host, scheme, _ = parts.hostname, parts.scheme, parts.port
        except ValueError:
            host, scheme = None, ""
        if scheme not in ("http", "https") or not host or parts.username or parts.query or parts.fragment:
            raise invalid_value("url", f"{url!r} is no address: write http://HOST:PORT")
        if host not in self._places:
            raise Refusal(
                403, f"workers on {host} are not allowed here; add it to worker_hosts", param="url", code="wrong_host"
            )
        return url.rstrip("/")


class AllowedHosts:
    """Hosts allowed for workers: names, `*.suffix`, addresses and networks; `*` is any."""

    def __init__(self, allowed: Iterable[str]) -> None:
        self._names: set[str] = set()
        self._suffixes: list[str] = []
        self._networks: list[ipaddress.IPv4Network | ipaddress.IPv6Network] = []
        for entry in allowed:
            text = entry.strip().lower()
            if "/" in text:
                try:
                    self._networks.append(ipaddress.ip_network(text))
                except ValueError as fault:
                    raise InputError(
                        f"worker_hosts: {fault}", hint="a name, *.suffix, an address, or 10.0.0.0/8"
                    ) from None
            elif text.startswith("*"):
                self._suffixes.append(text[1:])
            elif text:
                self._names.add(text)
            else:
                raise InputError("worker_hosts has an empty entry")

    def __contains__(self, host: str) -> bool:
        host = host.lower()
        if host in self._names or any(host.endswith(suffix) for suffix in self._suffixes):
            return True
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return False
        return any(address in network for network in self._networks)
