"""Deliberate faults of the host code of a GPU: an event that is missing, a value that the host reads too early or
directly, memory that is used again or freed too early. As in tests/mutation/faults.py; host_faults_test has each of
them on, under many orders of the streams.
"""

from faults import Fault

DEVICE = "ops/cuda/device.cpp"
GROUP = "ops/cuda/device_group.cpp"


def fault(name, meaning, file="", text="", instead=""):
    """Without a file: its switch stands in another one's text."""
    return Fault(name, meaning, file, text, instead)


def on(name):
    return f'::espalier::mutation::active("{name}")'


MISSING_EVENTS = [
    fault("stored_before_computed", "the copy of a trunk's layer does not wait for its computation", DEVICE,
          """  wait(Queue::copy, computed);
  copy(Queue::copy, host, memory, static_cast<std::size_t>(bytes));
  forget(computed);
  wait_and_forget(record(Queue::copy));""",
          f"""  if (!ON) wait(Queue::copy, computed);
  copy(Queue::copy, host, memory, static_cast<std::size_t>(bytes));
  forget(computed);
  if (!{on("layer_stored_before_it_came")}) wait_and_forget(record(Queue::copy));"""),
    fault("result_before_computed", "the copy of a result does not wait for its computation", DEVICE,
          """  const Event computed = record(Queue::compute);
  wait(Queue::copy, computed);
  copy_rows(Queue::copy, {memory, layout.width, tensor.data_ptr(), layout.stride, layout.width, layout.rows});
""",
          f"""  const Event computed = record({on("event_of_the_wrong_stream")} ? Queue::copy : Queue::compute);
  const bool late = {on("waits_behind_the_copy")};
  if (!ON && !late) wait(Queue::copy, computed);
  copy_rows(Queue::copy, {{memory, layout.width, tensor.data_ptr(), layout.stride, layout.width, layout.rows}});
  if (late) wait(Queue::copy, computed);
"""),
    fault("event_of_the_wrong_stream", "the copy of a result waits for earlier copies"),
    fault("waits_behind_the_copy", "the copy stream waits when the copy has been given"),
    fault("values_in_the_copy_stream", "what the host hands over goes through the stream that operations do not wait for",
          DEVICE, "copy_rows(Queue::compute, {to + row * layout.stride + at, layout.stride, block, width, width, rows});",
          f"""copy_rows(ON ? Queue::copy : Queue::compute,
              {{to + row * layout.stride + at, layout.stride,
               {on("values_not_staged")} ? from + row * layout.width + at : block, width, width, rows}});"""),
    fault("page_taken_again_unseen", "a page that goes and comes at its place is copied to while work still uses it"),
]

HOST_READS = [
    fault("host_reads_before_the_copy", "a result is read before its copy has run", DEVICE,
          "wait_and_forget(landing.copied);", "if (!ON) TEXT"),
    fault("host_waits_for_the_computation", "a result is read when it is computed and not yet copied", DEVICE,
          "landing.copied = record(Queue::copy);", "landing.copied = record(ON ? Queue::compute : Queue::copy);"),
    fault("layer_stored_before_it_came", "a trunk's layer is written to the store before its copy has run"),
    fault("host_reads_log_probs_directly", "log-probs are read in the device's memory", "objective/fused_head.cpp",
          "return device_.start_to_host(block.series_2E);",
          "return ON ? Device::Coming{block.series_2E} : device_.start_to_host(block.series_2E);"),
    fault("host_reads_the_norm_directly", "the gradient's norm is read in the device's memory", "optimizer/adamw.cpp",
          "const at::Tensor on_host = device_.to_host(sum_N);",
          "const at::Tensor on_host = ON ? sum_N : device_.to_host(sum_N);"),
    fault("synchronizes_the_wrong_stream", "waiting for all work waits for copies alone", DEVICE,
          "void CudaDevice::synchronize() { wait_and_forget(record(Queue::compute)); }",
          "void CudaDevice::synchronize() { wait_and_forget(record(ON ? Queue::copy : Queue::compute)); }"),
    fault("time_of_what_has_not_happened", "the seconds of a phase are asked for before it has ended", DEVICE,
          "wait_until(end.event);", "if (!ON) TEXT"),
]

EARLY_REUSE = [
    fault("staging_written_over", "values are staged in a block whose copy has not run", DEVICE,
          "if (block.copied != kNoEvent) wait_and_forget(block.copied);",
          "if (!ON && block.copied != kNoEvent) wait_and_forget(block.copied);"),
    fault("staging_never_recorded", "nobody records that a block is on its way", DEVICE,
          "staging_[turn_].copied = record(Queue::compute);",
          f"""if (!ON) staging_[turn_].copied = record({on("staging_recorded_elsewhere")} ? Queue::copy : Queue::compute);"""),
    fault("staging_recorded_elsewhere", "a block is taken again after an event of the other stream"),
    fault("values_not_staged", "what the host hands over is read when the copy runs"),
    fault("landing_taken_again", "a result lands where one lies that nobody has read", DEVICE,
          "landing.free = false;", "landing.free = ON;"),
    fault("logits_written_over", "the next block's logits come into the room of those that are in use",
          "objective/fused_head.cpp", "has_two_rooms() ? static_cast", "!ON && has_two_rooms() ? static_cast"),
    fault("room_given_back_early", "a fetched chunk's buffer takes the next one before it is copied", DEVICE,
          "copy(Queue::copy, memory, host, static_cast<std::size_t>(bytes));\n  wait_and_forget(record(Queue::copy));",
          "copy(Queue::copy, memory, host, static_cast<std::size_t>(bytes));\n"
          "  ON ? wait(Queue::compute, record(Queue::copy)) : wait_and_forget(record(Queue::copy));"),
]

EARLY_FREES = [
    fault("page_leaves_early", "a page is taken elsewhere while work still uses it", DEVICE,
          "wait_and_forget(oldest.used);", "if (!ON) TEXT"),
    fault("addresses_freed_early", "reserved addresses go while work still uses them", DEVICE,
          "  try {\n    free_leaving();", "  try {\n    if (!ON) free_leaving();"),
    fault("first_page_of_others_freed", "the page that others use the beginning of is given back", DEVICE,
          "std::int64_t page = ceil_div(offset, page_bytes());",
          "std::int64_t page = ON ? offset / page_bytes() : ceil_div(offset, page_bytes());"),
    fault("last_page_of_others_freed", "the page that others use the end of is given back", DEVICE,
          "(page + 1) * page_bytes() <= offset + bytes;",
          "(ON ? page * page_bytes() < offset + bytes : (page + 1) * page_bytes() <= offset + bytes);"),
    fault("last_page_not_mapped", "a tensor's last page is not there", DEVICE,
          "std::int64_t page = offset / page_bytes(); page * page_bytes() < offset + bytes; ++page",
          "std::int64_t page = offset / page_bytes(); (page + (ON ? 1 : 0)) * page_bytes() < offset + bytes; ++page"),
]

# What the rules of events, pages and pinned memory forbid, whatever comes of it.
RULES = [
    fault("event_forgotten_twice", "an event is given back twice and is then two things at once", DEVICE,
          "  wait_until(event);\n  forget(event);\n", "  wait_until(event);\n  forget(event);\n  if (ON) forget(event);\n"),
    fault("waits_for_a_forgotten_event", "a queue waits for an event that was given back", DEVICE,
          "wait(Queue::copy, same->used);\n      forget(same->used);",
          f"""if (!{on("page_taken_again_unseen")}) {{
        if (ON) forget(same->used);
        wait(Queue::copy, same->used);
        if (!ON) forget(same->used);
      }}"""),
    fault("page_mapped_twice", "a page is mapped elsewhere and stays where it was", DEVICE,
          "unmap_page(oldest.page, oldest.at);", "if (!ON) TEXT"),
    fault("page_of_two_users", "a page that was given back is used again before it left its list", DEVICE,
          "leaving_.erase(same);", "if (!ON) TEXT"),
    fault("addresses_end_early", "fewer addresses are given back than were reserved", DEVICE,
          "give_back_addresses(memory, whole_pages(bytes));", "give_back_addresses(memory, whole_pages(ON ? bytes / 2 : bytes));"),
    fault("pinned_memory_grows_in_a_collective", "pinned memory is taken while a collective is under way", DEVICE,
          "if (!unfinished().empty()) {", "if (!ON && !unfinished().empty()) {"),
    fault("pinned_memory_leaves_in_a_collective", "pinned memory is freed while a collective is under way",
          "ops/cuda/collectives.cpp", "look_until([] { return false; });", "if (!ON) TEXT"),
    fault("page_unmapped_in_a_collective", "a page is wanted elsewhere and leaves its addresses while a collective is under way", DEVICE,
          """  wait_for_all_but_sends();
  // A send may have to wait for what this host does next, so a new page serves as long as there is memory.
  if (!unfinished().empty() && free_memory() > kReserve) return take_page();
  wait_for_collectives();
""",
          f"""  const bool sends_are_left = {on("page_unmapped_while_sent")};
  if (!ON) wait_for_all_but_sends();
  if (!ON && !sends_are_left && !unfinished().empty() && ({on("page_taken_of_the_reserve")} || free_memory() > kReserve)) return take_page();
  if (!ON && !sends_are_left) wait_for_collectives();
"""),
    fault("page_taken_of_the_reserve", "a new page is taken while memory is short and a returned one would serve"),
    fault("page_unmapped_while_sent", "a page leaves its addresses while what was sent cannot have left"),
    fault("page_freed_in_a_collective", "pages are freed while a collective is under way", DEVICE,
          "  if (!leaving_.empty()) wait_for_collectives();", "  if (!ON && !leaving_.empty()) wait_for_collectives();"),
    fault("pinned_memory_overrun", "what does not fit the pinned memory is copied past its end", DEVICE,
          "return here_ = pageable_.data();", "return here_ = ON ? static_cast<std::byte*>(memory_) : pageable_.data();"),
]

RANKS = [
    fault("collective_before_computed", "a collective reads what is not computed yet", GROUP,
          "wait(queue, computed);", "if (!ON) TEXT"),
    fault("read_before_the_collective", "what a collective brings is read before it has run", GROUP,
          "cuda::wait(Queue::compute, done_);", "if (!ON) TEXT"),
    fault("collective_behind_the_wrong_work", "a collective waits for earlier collectives alone", GROUP,
          "const Event computed = cuda::record(Queue::compute);",
          "const Event computed = cuda::record(ON ? queue : Queue::compute);"),
    fault("sent_without_a_copy", "what is sent is read when it leaves, and may be another's by then", GROUP,
          "give(sends_, {Kind::send, copy, {}, to})", f"give(sends_, {{Kind::send, ON ? x : copy, {{}}, to}})"),
    fault("copy_freed_before_it_left", "the copy of what is sent is given back at once", GROUP,
          "under_way_.push_back({copy,", "under_way_.push_back({ON ? at::Tensor() : copy,"),
]

FAULTS = [*MISSING_EVENTS, *HOST_READS, *EARLY_REUSE, *EARLY_FREES, *RULES, *RANKS]
