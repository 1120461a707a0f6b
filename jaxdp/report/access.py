"""Who may see the page: on the loopback interface everybody on this machine, elsewhere those who have the token."""

import hmac
import ipaddress
import re
import secrets
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs

# Names of this machine in the header Host, with any port, which may be forwarded. Another name is DNS rebinding: a foreign page
# whose name was made to lead here.
OWN_HOST = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:[0-9]{1,5})?", re.IGNORECASE)


def is_loopback(address: str) -> bool:
    """Whether an IP address is of the loopback interface."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


@dataclass(frozen=True)
class Access:
    """Decides about requests. token: None on the loopback interface. port: part of the name of the cookie."""

    token: str | None
    port: int

    @property
    def cookie(self) -> str:
        return f"jaxdp_watch_{self.port}"

    @classmethod
    def for_address(cls, address: str, port: int) -> "Access":
        """The rules for an address on which the server listens, with a new token if it needs one."""
        return cls(None if is_loopback(address) else secrets.token_urlsafe(24), port)

    def refusal(self, host: str | None, query: str, cookies: str | None) -> str | None:
        """Why a request is refused; None if it may be answered. host, cookies: its headers."""
        if self.token is None:
            if host is not None and OWN_HOST.fullmatch(host):
                return None
            return "this page is only for this machine; open it as localhost, or start jaxdp watch with --host"
        if self.has_token(query) or self._is_token(self._cookie_value(cookies)):
            return None
        return "the token is missing or wrong; open the address that jaxdp watch printed"

    def has_token(self, query: str) -> bool:
        """Whether the query of a URL has the token."""
        return any(map(self._is_token, parse_qs(query).get("token", [])))

    def set_cookie(self) -> str:
        """The header Set-Cookie that keeps the token."""
        return f"{self.cookie}={self.token}; HttpOnly; SameSite=Strict; Path=/"

    def _is_token(self, text: str) -> bool:
        return self.token is not None and hmac.compare_digest(text.encode(errors="replace"), self.token.encode())

    def _cookie_value(self, cookies: str | None) -> str:
        try:
            found = SimpleCookie(cookies or "").get(self.cookie)
        except CookieError:
            return ""
        return found.value if found else ""
