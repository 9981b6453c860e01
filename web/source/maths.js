// Formulas as MathML, by Temml's parser and builder. Loaded with the first formula.

import buildMathML from "temml/src/buildMathML.js";
import { StyleLevel } from "temml/src/constants.js";
import parseTree from "temml/src/parseTree.js";
import Settings from "temml/src/Settings.js";
import Style from "temml/src/Style.js";

/** Parses a formula into a tree with `toNode()`. Throws on syntax errors, and on commands that Temml
 * does not trust, such as those that load images. */
export function treeOf(source, isBlock) {
  const settings = new Settings({
    displayMode: isBlock,
    throwOnError: true,
    maxExpand: 200,
    maxSize: [20, 100],
  });
  const level = isBlock ? StyleLevel.DISPLAY : StyleLevel.TEXT;
  const style = new Style({ level, maxSize: settings.maxSize });
  return buildMathML(parseTree(source, settings), source, style, settings);
}
