// A function's arguments in words of 8 bytes each, so that a list of calls can be written down and made again.
#pragma once
#include <cstdint>
#include <cstring>
#include <utility>

// What a list is made of: an operation, its arguments, the next operation, and so on; a null ends it.
union Word {
    const Word* (*operation)(const Word* arguments);  // returns what follows its arguments
    uint64_t bits;
};

namespace {

template <typename T>
T argument(const Word& word) {
    static_assert(sizeof(T) <= sizeof word);
    T value;
    std::memcpy(&value, &word, sizeof value);  // machines are little-endian here: the low bytes come first
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

// Gives a function its operation.
#define REPLAYED(NAME) \
    extern "C" const Word* NAME##_replayed(const Word* arguments) { return call(NAME, arguments); }
