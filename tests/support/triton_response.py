"""Responses of a model in Triton's gRPC protocol, for servers that stand in for Triton."""

from tritonclient.grpc import service_pb2


def response(text: str, finish_reason: str = "", tokens: int | None = None) -> service_pb2.ModelStreamInferResponse:
    """A message of the stream. It is the last one if it has a finish reason. ``tokens``: how many token ids it has."""
    message = service_pb2.ModelStreamInferResponse()
    infer = message.infer_response
    infer.parameters["triton_final_response"].bool_param = bool(finish_reason)
    for name, value in (("text_output", text), ("finish_reason", finish_reason)):
        content = value.encode()
        infer.outputs.add(name=name, datatype="BYTES", shape=[1, 1])
        infer.raw_output_contents.append(len(content).to_bytes(4, "little") + content)
    if tokens is not None:
        infer.outputs.add(name="token_ids", datatype="INT32", shape=[1, tokens])
        infer.raw_output_contents.append(bytes(4 * tokens))
    return message
