"""Names of the platform's module that code uses to test whether a value is a binding."""

from workers.bindings.service import Fetcher as _FetcherWrapper
from workers.entrypoint import python_from_rpc, python_to_rpc
from workers.face import Face as _BindingWrapper
from workers.host import Env as _EnvWrapper
from workers.remote.stubs import RpcStub as _RpcStubWrapper

__all__ = [
    "_BindingWrapper",
    "_EnvWrapper",
    "_FetcherWrapper",
    "_RpcStubWrapper",
    "python_from_rpc",
    "python_to_rpc",
]
