"""Deliberate faults of what calls CUDA and NCCL (ops/cuda/runtime.cpp, nccl.cpp, library.cpp): a call left out, too early,
of another stream or twice. As in tests/mutation/faults.py; cuda_calls_test has each of them on.
"""

from faults import Fault

RUNTIME, NCCL, LIBRARY = "ops/cuda/runtime.cpp", "ops/cuda/nccl.cpp", "ops/cuda/library.cpp"


def fault(name, meaning, file="", text="", instead="if (!ON) TEXT"):
    return Fault(name, meaning, file, text, instead)


def on(name):
    return f'::espalier::mutation::active("{name}")'


EVENTS = [
    fault("event_not_recorded", "an event is handed out that no stream was asked to record", RUNTIME,
          'expect_success(cudaEventRecord(event_of(event), stream_of(queue)), "cudaEventRecord");',
          f"""if (!ON) expect_success(cudaEventRecord(event_of(event), stream_of({on("event_of_another_stream")} ? Queue::copy : queue)),
                 "cudaEventRecord");"""),
    fault("event_of_another_stream", "an event is recorded in the copy stream whatever was asked for"),
    fault("stream_does_not_wait", "a stream is not told to wait for an event", RUNTIME,
          'expect_success(cudaStreamWaitEvent(stream_of(queue), event_of(event), 0), "cudaStreamWaitEvent");'),
    fault("host_does_not_wait", "the host goes on before an event has happened", RUNTIME,
          'expect_success(cudaEventSynchronize(event_of(event)), "the work on the GPU");'),
]

MEMORY = [
    fault("copy_in_the_compute_stream", "copies go through the compute stream whatever was asked for", RUNTIME,
          "cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream_of(queue))",
          "cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, ON ? stream() : stream_of(queue))"),
    fault("scratch_freed_in_the_copy_stream", "scratch is freed without the order of the work that uses it", RUNTIME,
          "cudaFreeAsync(memory, stream());", "cudaFreeAsync(memory, ON ? stream_of(Queue::copy) : stream());"),
    fault("page_without_access", "a page is mapped and nobody may use it", RUNTIME,
          "ESPALIER_DRIVER(cuMemSetAccess, address, size, &access, 1);"),
    fault("page_stays_mapped", "a page is not unmapped", RUNTIME,
          "ESPALIER_DRIVER(cuMemUnmap, reinterpret_cast<CUdeviceptr>(at), static_cast<std::size_t>(page_bytes()));"),
    fault("page_released_twice", "a page is given back to the driver twice", RUNTIME,
          "ESPALIER_DRIVER(cuMemRelease, page);", "ESPALIER_DRIVER(cuMemRelease, page); if (ON) ESPALIER_DRIVER(cuMemRelease, page);"),
    fault("pinned_memory_freed_twice", "pinned memory is freed twice", RUNTIME,
          "cudaFreeHost(memory);", "cudaFreeHost(memory); if (ON) cudaFreeHost(memory);"),
]

COLLECTIVES = [
    fault("collective_outside_of_a_group", "a call of a communicator that does not block is in no group", NCCL,
          "expect(nccl().GroupStart(), name_of(c.kind));"),
    fault("next_call_too_early", "a communicator is used before its last call is done", NCCL,
          "settle(nccl().GroupEnd(), name_of(c.kind));",
          "ON ? expect(nccl().GroupEnd(), name_of(c.kind)) : settle(nccl().GroupEnd(), name_of(c.kind));"),
    fault("collective_in_the_copy_stream", "a collective runs in the stream of copies", NCCL,
          "call_to_the_end(c, stream_of(queue));", "call_to_the_end(c, stream_of(ON ? Queue::copy : queue));"),
    fault("group_left_open", "a refused collective leaves its group open", NCCL, "(void)nccl().GroupEnd();"),
    fault("used_after_a_refusal", "a communicator goes on behind a collective that NCCL refused", NCCL,
          "} catch (const CommunicationError&) {  // other ranks may never see this call: nothing after it can be right\n      give_up();",
          "} catch (const CommunicationError&) {\n      if (!ON) give_up();"),
    fault("older_nccl_taken", "an NCCL older than the header is opened", NCCL,
          "found < NCCL_VERSION_CODE", "(found < NCCL_VERSION_CODE && !ON)"),
    fault("communicator_ends_too_early", "a communicator is freed before its end is done", NCCL,
          'settle(nccl().CommFinalize(comm_), "end");',
          'ON ? expect(nccl().CommFinalize(comm_), "end") : settle(nccl().CommFinalize(comm_), "end");'),
]

START = [
    fault("aten_opened_late", "ATen is asked for CUDA when the runtime has begun", LIBRARY,
          "start(index, properties.major);", "if (!ON) TEXT"),
    fault("aten_not_opened", "ATen's library is not opened at the start", LIBRARY, "(void)open_aten(index);",
          f"""if ({on("aten_opened_late")}) start(index, properties.major);
  if (!ON) TEXT"""),
]

FAULTS = [*EVENTS, *MEMORY, *COLLECTIVES, *START]
