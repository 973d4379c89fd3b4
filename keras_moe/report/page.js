// The chooser of an example, a layer, an expert and a token. Without JavaScript the page
// only has the maps of all layers. Texts of data become text nodes, never markup.
(() => {
  "use strict";
  const source = document.getElementById("explorer-data");
  if (!source) return;
  const data = JSON.parse(source.textContent);
  const part = (name) => document.getElementById("explorer-" + name);
  const names = ["example", "layer", "expert", "token"];
  const selects = Object.fromEntries(names.map((name) => [name, part(name)]));
  const ALL = "all";
  const [rows, columns] = data.grid || [0, 0];

  // The bits of `pack` in _markup.py: expert, whether it serves, value.
  const decoded = new Map();
  function entriesOf(exampleIndex, layerIndex) {
    const place = exampleIndex + "/" + layerIndex;
    if (decoded.has(place)) return decoded.get(place);
    const parts = {};
    const packed = data.examples[exampleIndex].layers[layerIndex];
    for (const [modality, record] of Object.entries(packed)) {
      const bytes = Uint8Array.from(atob(record.entries), (c) => c.charCodeAt(0));
      const view = new DataView(bytes.buffer);
      const kept = data.layers[layerIndex].kept[modality];
      const tokens = (parts[modality] = []);
      for (let i = 0; i < bytes.length / 4; i++) {
        const bits = view.getUint32(4 * i, true);
        const value = ((bits & 32767) / 32767) * record.largest;
        if (i % kept === 0) tokens.push([]);
        const entry = { expert: bits >>> 16, served: ((bits >>> 15) & 1) === 1, value };
        tokens[tokens.length - 1].push(entry);
      }
    }
    decoded.set(place, parts);
    return parts;
  }

  function element(name, attributes, text) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    Object.entries(attributes).forEach((pair) => made.setAttribute(...pair));
    made.textContent = text || "";
    return made;
  }

  function fill(select, choices) {
    const before = select.value;
    select.replaceChildren(...choices.map(([value, text]) => new Option(text, value)));
    if (choices.some(([value]) => String(value) === before)) select.value = before;
  }

  const numbered = (texts) => texts.map((text, index) => [index, text]);

  function tokenName(place) {
    const [modality, index] = place.split(":");
    if (modality === "text") {
      const words = data.examples[selects.example.value].words;
      return "word " + (Number(index) + 1) + ", " + words[index];
    }
    const row = Math.floor(index / columns);
    return "patch of row " + (row + 1) + ", column " + (index - row * columns + 1);
  }

  // A new layer or example has other experts or tokens.
  function refill() {
    const example = data.examples[selects.example.value];
    const layer = data.layers[selects.layer.value];
    fill(selects.expert, [[ALL, "all"], ...numbered(layer.experts)]);
    const parts = entriesOf(selects.example.value, selects.layer.value);
    const places = Object.entries(parts).flatMap(([modality, tokens]) =>
      tokens.map((_, index) => modality + ":" + index)
    );
    fill(selects.token, [[ALL, "all"], ...places.map((p) => [p, tokenName(p)])]);
    part("map").toggleAttribute("hidden", !(example.image && parts.image));
    part("words").toggleAttribute("hidden", !parts.text);
    draw();
  }

  // What a token shows: the expert that serves it most, or one expert's value.
  function shown(entries, expert) {
    const { served, value } = entries[0];
    if (expert === ALL) return { expert: served ? entries[0].expert : null, served, value };
    const none = { expert: Number(expert), served: false, value: 0 };
    return entries.find((entry) => entry.expert === Number(expert)) || none;
  }

  function textOf(entry, expert) {
    if (expert === ALL) return entry.expert === null ? "x" : String(entry.expert);
    return entry.value.toFixed(2).replace(/^0/, "");
  }

  function classOf(entry, expert) {
    if (expert !== ALL) return entry.served ? "heat served" : "heat";
    return entry.expert === null ? "none" : "c" + (entry.expert % data.colours);
  }

  // A box for each patch, which `paint` changes, over some elements.
  function drawMap(map, below, count, paint) {
    const size = data.cell;
    map.setAttribute("viewBox", "0 0 " + columns * size + " " + rows * size);
    map.replaceChildren(...below);
    for (let index = 0; index < count; index++) {
      const x = (index % columns) * size;
      const y = Math.floor(index / columns) * size;
      const box = element("rect", { x, y, width: size, height: size });
      map.append(box);
      paint(box, index, x, y);
    }
  }

  function drawPatches(tokens, example, expert, largest, chosen) {
    const [size, map] = [data.cell, part("map")];
    const image = element("use", { href: "#" + example.image });
    drawMap(map, [image], tokens.length, (box, index, x, y) => {
      const entry = shown(tokens[index], expert);
      box.setAttribute("class", classOf(entry, expert));
      if (expert !== ALL) box.style.fillOpacity = (0.75 * entry.value) / largest;
      if (chosen === "image:" + index) box.classList.add("chosen");
      box.addEventListener("click", () => choose("image:" + index));
      if (expert !== ALL && columns > 8) return;
      const corner = { x: x + 0.06 * size, y: y + 0.3 * size };
      map.append(element("text", corner, textOf(entry, expert)));
    });
  }

  function drawWords(tokens, words, expert, largest, chosen) {
    part("words").replaceChildren(
      ...tokens.flatMap((entries, index) => {
        const entry = shown(entries, expert);
        const chip = document.createElement("span");
        chip.className = "chip " + classOf(entry, expert);
        chip.style.setProperty("--heat", expert === ALL ? 0 : entry.value / largest);
        if (chosen === "text:" + index) chip.classList.add("chosen");
        const number = document.createElement("sub");
        number.textContent = textOf(entry, expert);
        chip.append(words[index], number);
        chip.addEventListener("click", () => choose("text:" + index));
        return [chip, " "];
      })
    );
  }

  function sentence(parts, layer, expert, largest, chosen) {
    const worth = { soft: "share of its slots", mumoe: "coefficient" };
    const word = worth[layer.kind] || "gate";
    if (chosen !== ALL) {
      const [modality, index] = chosen.split(":");
      const entries = parts[modality][index].map((entry) => {
        const serves = entry.served && layer.kind !== "soft" ? ", serves" : "";
        return layer.experts[entry.expert] + " (" + entry.value.toFixed(3) + serves + ")";
      });
      const more = entries.length > 8 ? " and others" : "";
      const name = layer.name + ", " + tokenName(chosen);
      return name + ": experts by " + word + " " + entries.slice(0, 8).join("; ") + more;
    }
    const texts = Object.entries(parts).map(([modality, tokens]) => {
      const name = modality === "text" ? " words" : " patches";
      const entries = tokens.map((token) => shown(token, expert));
      const count = entries.filter((entry) => entry.served).length;
      return count + " of " + tokens.length + name;
    });
    if (expert === ALL && layer.kind in worth) {
      return layer.name + ": all experts have a part; the heaviest has its number";
    }
    if (expert === ALL) return layer.name + ": an expert serves " + texts.join(", ");
    const deepest = "the deepest colour is a " + word + " of " + largest.toFixed(3);
    const serves = "serves " + texts.join(", ") + " (framed); " + deepest;
    return layer.name + ", expert " + layer.experts[expert] + ": " + serves;
  }

  function draw() {
    const example = data.examples[selects.example.value];
    const layer = data.layers[selects.layer.value];
    const parts = entriesOf(selects.example.value, selects.layer.value);
    const [expert, chosen] = [selects.expert.value, selects.token.value];
    const tokens = Object.values(parts).flat();
    const values = tokens.map((entries) => shown(entries, expert).value);
    const largest = Math.max(...values, 1e-9);
    if (parts.image) drawPatches(parts.image, example, expert, largest, chosen);
    if (parts.text) drawWords(parts.text, example.words, expert, largest, chosen);
    const said = sentence(parts, layer, expert, largest, chosen) + ".";
    part("says").textContent = said;
    part("map").setAttribute("aria-label", said);
  }

  function choose(token) {
    selects.token.value = selects.token.value === token ? ALL : token;
    draw();
  }

  function step(by) {
    const count = data.layers.length;
    selects.layer.value = (Number(selects.layer.value) + by + count) % count;
    refill();
  }

  fill(selects.example, numbered(data.examples.map((each) => each.name)));
  fill(selects.layer, numbered(data.layers.map((each) => each.name)));
  const acts = { example: refill, layer: refill, expert: draw, token: draw };
  names.forEach((name) => selects[name].addEventListener("change", acts[name]));
  part("back").addEventListener("click", () => step(-1));
  part("on").addEventListener("click", () => step(1));
  part("chooser").hidden = false;
  refill();
})();
