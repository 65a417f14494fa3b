"""Pictures in a chat (pure): only those that are in the request itself."""

from __future__ import annotations

import binascii
import re

from localai_dist.httpapi.errors import bad_request

_DATA = re.compile(r"data:image/[A-Za-z0-9.+-]+;base64,(?P<content>.+)", re.DOTALL | re.IGNORECASE)


def image_of(url: str, where: str) -> str:
    """
    The picture in ``url``, as the base64 that the contract with backends wants.

    An address is never fetched: whoever may ask a model could have the frontend call what only it can reach.

    Args:
        where: the field, for the refusal.

    Raises:
        ApiError: 400; an address, or no picture in base64.
    """
    if url[:8].lower().startswith(("http://", "https://")):
        raise bad_request(f"{where}: this server fetches no pictures: send it as data:image/png;base64,...", where)
    found = _DATA.fullmatch(url)
    if found is None:
        raise bad_request(f"{where}: want a picture as data:image/png;base64,...", where)
    try:
        content = binascii.a2b_base64(found["content"], strict_mode=True)
    except (binascii.Error, ValueError) as error:
        raise bad_request(f"{where}: this is no base64: {error}", where) from error
    if not content:
        raise bad_request(f"{where}: the picture is empty", where)
    return found["content"]
