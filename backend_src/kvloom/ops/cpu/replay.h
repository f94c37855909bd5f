// Stores a function's arguments in words of 8 bytes, so that a list of calls can be recorded and replayed.
#pragma once
#include <cstdint>
#include <cstring>
#include <utility>

// A word of a list. The list is an operation, its arguments, the next operation and so on, and ends with null.
union Word {
    const Word* (*operation)(const Word* arguments);  // returns the word after its arguments
    uint64_t bits;
};

namespace {

template <typename T>
T argument(const Word& word) {
    static_assert(sizeof(T) <= sizeof word);
    T value;
    std::memcpy(&value, &word, sizeof value);  // x86 is little-endian: the low bytes come first
    return value;
}

template <typename R, typename... A, size_t... I>
void call(R (*function)(A...), const Word* arguments, std::index_sequence<I...>) {
    function(argument<A>(arguments[I])...);
}

template <typename R, typename... A>
const Word* call(R (*function)(A...), const Word* arguments) {
    call(function, arguments, std::index_sequence_for<A...>());
    return arguments + sizeof...(A);
}

}  // namespace

// Defines a function's operation for replays.
#define REPLAYED(NAME) \
    extern "C" const Word* NAME##_replayed(const Word* arguments) { return call(NAME, arguments); }
