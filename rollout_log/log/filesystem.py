"""Which file system a path lies on, so that LMDB is kept off the ones where its locks do not hold."""

from __future__ import annotations

import os
from pathlib import Path

from rollout_log.errors import UnsafeFileSystem

__all__ = ["file_system", "refuse_network"]

MOUNTINFO = Path("/proc/self/mountinfo")

# fmt: off
_NETWORK = frozenset((
    "9p", "afs", "beegfs", "ceph", "cifs", "coda", "davfs2", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs",
    "nfs4", "ocfs2", "orangefs", "pvfs2", "smb3", "smbfs", "wekafs",
))
_NETWORK_FUSE = frozenset((
    "alluxio", "alluxio-fuse", "beegfs", "blobfuse", "blobfuse2", "ceph", "ceph-fuse", "cephfs", "davfs",
    "dfuse", "gcsfuse", "glusterfs", "goofys", "hdfs", "juicefs", "mfs", "moosefs", "mountpoint-s3", "rclone",
    "s3fs",
    "seaweedfs", "smbnetfs", "sshfs", "weed",
))
# fmt: on


def file_system(path: str | os.PathLike[str], mountinfo: Path | None = None) -> str | None:
    """Return the type of the file system that holds `path`, such as `ext4`, or None where it cannot be told.

    `mountinfo` is a file in the format of `/proc/self/mountinfo`; the longest mount point that holds
    the path counts, and of equal ones the last, which lies on top.
    """
    try:
        lines = (mountinfo or MOUNTINFO).read_text(errors="surrogateescape").splitlines()
    except OSError:
        return None
    target = Path(os.path.realpath(path))
    best, kind = -1, None
    for line in lines:
        mount, _, source = line.partition(" - ")
        fields = mount.split(" ")
        if len(fields) < 5 or not source:
            continue
        point = Path(_unescape(fields[4]))
        if target.is_relative_to(point) and len(point.parts) >= best:
            best, kind = len(point.parts), source.split(" ", 1)[0]
    return kind


def is_network(kind: str) -> bool:
    """Whether a file system type is shared between machines."""
    return kind in _NETWORK or (kind.startswith("fuse.") and kind[len("fuse.") :] in _NETWORK_FUSE)


def refuse_network(path: str | os.PathLike[str], mountinfo: Path | None = None) -> None:
    """Raise `UnsafeFileSystem` where `path` lies on a network file system."""
    kind = file_system(path, mountinfo)
    if kind is not None and is_network(kind):
        raise UnsafeFileSystem(
            f"{os.fspath(path)} is on {kind}, a network file system, where the locks of a log that is being "
            "written do not hold: record to a local disk (such as $TMPDIR) and copy the log when it is done"
        )


def _unescape(field: str) -> str:
    r"""Undo the octal escapes (`\040` for a space) of mountinfo."""
    head, *rest = field.split("\\")
    return head + "".join(
        chr(int(part[:3], 8)) + part[3:] if part[:3].isdigit() else "\\" + part for part in rest
    )
